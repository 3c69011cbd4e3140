// Runs programs in @anthropic-ai/sandbox-runtime as a library: settings, then a job a line on standard input, and a
// result a line on output. What can be is done once; each command has a sandbox of its own.
import { spawn } from 'node:child_process'
import { createInterface } from 'node:readline'

const { SandboxManager } = await import(process.argv[2])
let ready = false
for await (const line of createInterface({ input: process.stdin })) {
  const job = JSON.parse(line)
  if (!ready) {
    await SandboxManager.initialize(job)
    ready = true
    continue
  }
  const result = { stdout: '', stderr: '', code: 0, problem: '' }
  try {
    const command = await SandboxManager.wrapWithSandbox(job.command)
    const child = spawn(command, { shell: true, stdio: ['ignore', 'pipe', 'pipe'] })
    for (const name of ['stdout', 'stderr']) child[name].on('data', data => (result[name] += data))
    result.code = await new Promise((done, fail) => child.on('close', done).on('error', fail))
    SandboxManager.cleanupAfterCommand()
  } catch (problem) {
    result.problem = String(problem)
  }
  process.stdout.write(JSON.stringify(result) + '\n')
}
await SandboxManager.reset()
process.exit()
