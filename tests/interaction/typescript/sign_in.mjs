// A TypeScript client that knows a server's address alone: `node sign_in.mjs v1|v2 URL`. It signs in where the server says,
// at a provider that asks nothing, calls a tool, and prints what it saw as one JSON object.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const require = createRequire(join(process.env.GLOVEBOX_NODE_DIR, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const [sdk, url] = process.argv.slice(2);
const base = "@modelcontextprotocol/sdk/client";
const { Client, StreamableHTTPClientTransport } =
  sdk === "v1"
    ? { ...(await load(`${base}/index.js`)), ...(await load(`${base}/streamableHttp.js`)) }
    : await load("@modelcontextprotocol/client");

const kept = { asked: [] };
const provider = {
  redirectUrl: "http://127.0.0.1:1/callback",
  clientMetadata: {
    client_name: "typescript",
    redirect_uris: ["http://127.0.0.1:1/callback"],
    grant_types: ["authorization_code", "refresh_token"],
    response_types: ["code"],
    token_endpoint_auth_method: "none",
  },
  clientInformation: () => kept.client,
  saveClientInformation: (client) => void (kept.client = client),
  tokens: () => kept.tokens,
  saveTokens: (tokens) => void (kept.tokens = tokens),
  saveCodeVerifier: (verifier) => void (kept.verifier = verifier),
  codeVerifier: () => kept.verifier,
  redirectToAuthorization: async (place) => {
    kept.asked.push({ resource: place.searchParams.get("resource"), pkce: place.searchParams.get("code_challenge_method") });
    const answer = await fetch(place, { redirect: "manual" });
    kept.answer = new URL(answer.headers.get("location")).searchParams;
  },
};
const transport = () => new StreamableHTTPClientTransport(new URL(`${url}/mcp`), { authProvider: provider });
const client = () => new Client({ name: `typescript-${sdk}`, version: "1" });

const first = transport();
let refused = null;
try {
  await client().connect(first);
} catch (error) {
  refused = error.constructor.name;
}
await first.finishAuth(sdk === "v1" ? kept.answer.get("code") : kept.answer);
const signedIn = client();
await signedIn.connect(transport());
const args = { name: "run_python", arguments: { code: "1" } };
const result = await signedIn.callTool(args);
console.log(JSON.stringify({ refused, asked: kept.asked, stdout: result.structuredContent.stdout }));
await signedIn.close();
