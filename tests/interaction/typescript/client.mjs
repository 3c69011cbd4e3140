// One session with a Glovebox server through an SDK that is not ours; prints what it saw as one JSON object.
//
//   node client.mjs v1|v2|v2-modern stdio|http|sse TARGET…
//
// TARGET is the command for stdio, else the base URL and the token. GLOVEBOX_NODE_DIR is where the packages are.
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";
import { join } from "node:path";

const require = createRequire(join(process.env.GLOVEBOX_NODE_DIR, "package.json"));
const load = (name) => import(pathToFileURL(require.resolve(name)).href);
const [sdk, transport, ...target] = process.argv.slice(2);

async function pieces() {
  if (sdk === "v1") {
    const base = "@modelcontextprotocol/sdk/client";
    const [index, stdio, http, sse] = await Promise.all([
      load(`${base}/index.js`), load(`${base}/stdio.js`), load(`${base}/streamableHttp.js`), load(`${base}/sse.js`),
    ]);
    return { ...index, ...stdio, ...http, ...sse };
  }
  const name = "@modelcontextprotocol/client";
  return { ...(await load(name)), ...(await load(`${name}/stdio`)) };
}

const { Client, StdioClientTransport, StreamableHTTPClientTransport, SSEClientTransport } = await pieces();

function connection() {
  if (transport === "stdio") {
    const [command, ...args] = target;
    return new StdioClientTransport({ command, args, env: process.env, stderr: "inherit" });
  }
  const [url, token] = target;
  const headers = { Authorization: `Bearer ${token}` };
  if (transport === "http") return new StreamableHTTPClientTransport(new URL(`${url}/mcp`), { requestInit: { headers } });
  return new SSEClientTransport(new URL(`${url}/sse`), { requestInit: { headers } });
}

const options = sdk === "v2-modern" ? { versionNegotiation: { mode: "auto" } } : {};
// Where its list changes, that is all it waits for: it prints the names before, and those after. Otherwise there is a person.
const print = (tools) => process.stdout.write(JSON.stringify(tools.map((tool) => tool.name)) + "\n");
let changed;
const change = new Promise((resolve) => (changed = resolve));
if (process.env.LIST_CHANGES) options.listChanged = { tools: { onChanged: (error, tools) => changed(print(tools)) } };
else options.capabilities = { elicitation: { form: {} } };
const client = new Client({ name: `typescript-${sdk}`, version: "1" }, options);
// v1 takes the result's schema as the second parameter, v2 has none.
const call = (name, args, more) =>
  sdk === "v1" ? client.callTool({ name, arguments: args }, undefined, more) : client.callTool({ name, arguments: args }, more);

const seen = { sdk, transport, progress: [], asked: [] };
// What comes in one read with its result, which a busy machine brings about, the first SDK tells as an error: it hands a
// notification on a moment later than a result, and by then nobody waits for progress.
client.onerror = ({ message }) => {
  const late = /progress notification for an unknown token: (.*)/s.exec(message);
  if (late) seen.progress.push(JSON.parse(late[1]).params.message);
};
await client.connect(connection());
if (process.env.LIST_CHANGES) {
  print((await client.listTools()).tools);
  await change;
  await client.close();
  process.exit(0);
}
const answers = ["allow", "deny", "allow"];
const { ElicitRequestSchema } = sdk === "v1" ? await load("@modelcontextprotocol/sdk/types.js") : {};
client.setRequestHandler(ElicitRequestSchema ?? "elicitation/create", async ({ params }) => {
  seen.asked.push(params.message);
  return { action: "accept", content: { answer: answers.shift() } };
});
seen.protocol = client.getNegotiatedProtocolVersion?.() ?? client.transport?._protocolVersion ?? null;
seen.tools = (await client.listTools()).tools.map((tool) => tool.name);
const code = process.env.CODE;
seen.ran = await call("run_python", { code }, { onprogress: (update) => seen.progress.push(update.message) });
seen.denied = await call("run_python", { code });
const link = seen.ran.content.find((block) => block.type === "resource_link" && block.name === "a.txt");
seen.resource = (await client.readResource({ uri: link.uri })).contents[0];
seen.part = (await client.readResource({ uri: `${link.uri}?offset=1&length=3` })).contents[0];
seen.prompts = (await client.listPrompts()).prompts;
seen.completed = (
  await client.complete({ ref: { type: "ref/prompt", name: "compare_files" }, argument: { name: "path", value: "da" } })
).completion;
seen.invalid = await call("run_python", { code, sandbox_config: { network: true } });
try {
  seen.unknown = await call("run_shell", {});
} catch (error) {
  seen.unknown = { code: error.code, message: error.message };
}
// Given up as soon as the server says that it runs.
const abort = new AbortController();
const onprogress = ({ message }) => message.startsWith("Running") && abort.abort("enough");
const endless = call("run_python", { code: "while True: pass" }, { signal: abort.signal, onprogress });
seen.cancelled = await endless.then(() => "answered", () => "given up");
await client.close();
process.stdout.write(JSON.stringify(seen) + "\n");
