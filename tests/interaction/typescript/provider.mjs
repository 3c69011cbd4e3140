// An identity provider: `node provider.mjs CALLBACK SCOPE…`. Prints its issuer once it serves. Clients register themselves,
// but for `known`, which may ask for every scope; people sign in with any password and are asked for their consent; access
// tokens are JWTs for the resource that was asked for.
import { createServer } from "node:http";
import { pathToFileURL } from "node:url";
import { createRequire } from "node:module";

const packages = createRequire(`${process.env.GLOVEBOX_NODE_DIR}/package.json`);
const { default: Provider } = await import(pathToFileURL(packages.resolve("oidc-provider")).href);
const [callback, ...scopes] = process.argv.slice(2);

const server = createServer();
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const issuer = `http://127.0.0.1:${server.address().port}`;
const provider = new Provider(issuer, {
  scopes: ["openid", "offline_access", ...scopes],
  clients: [
    {
      client_id: "known",
      redirect_uris: [callback],
      token_endpoint_auth_method: "none",
      grant_types: ["authorization_code", "refresh_token"],
      response_types: ["code"],
      application_type: "native",
    },
  ],
  claims: { openid: ["sub"], profile: ["preferred_username"] },
  findAccount: (_, id) => ({ accountId: id, claims: () => ({ sub: id, preferred_username: id }) }),
  features: {
    devInteractions: { enabled: true },
    registration: { enabled: true },
    resourceIndicators: {
      enabled: true,
      defaultResource: () => undefined,
      useGrantedResource: () => true,
      getResourceServerInfo: (_, resource) => ({
        scope: scopes.join(" "),
        audience: resource,
        accessTokenTTL: 300,
        accessTokenFormat: "jwt",
        jwt: { sign: { alg: "RS256" } },
      }),
    },
  },
  extraTokenClaims: (_, token) => ({ preferred_username: token.accountId }),
  pkce: { required: () => true },
  cookies: { keys: ["of a test"] },
});
server.on("request", provider.callback());
console.log(issuer);
