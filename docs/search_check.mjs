// Asks the site's search as a browser does: node docs/search_check.mjs SITE < queries
// Reads one query a line; prints one line of JSON for each: the pages found, best first,
// and the sections that Material unfolds below each.
import fs from "node:fs"
import path from "node:path"
import vm from "node:vm"

const site = process.argv[2]
const workers = path.join(site, "assets/javascripts/workers")
const script = fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")))

// Material's worker, which here runs in this process.
globalThis.Worker = class extends EventTarget {
  scope = {
    console: { warn() {} },
    addEventListener: (_, listener) => (this.listen = listener),
    postMessage: data => this.dispatchEvent(new MessageEvent("message", { data })),
  }
  constructor() {
    super()
    this.scope.self = this.scope
    vm.runInNewContext(fs.readFileSync(path.join(workers, script), "utf8"), this.scope)
  }
  postMessage(data) {
    this.listen({ data })
  }
}
globalThis.fetch = async () => ({ json: async () => index })

// In the order of a browser: Material listens, search_query.mjs runs, someone asks.
const worker = new Worker()
let answer
worker.addEventListener("message", event => answer(event.data))
await import("./search_query.mjs")
const ask = message => new Promise(done => { answer = done; worker.postMessage(message) })

const SETUP = 0, QUERY = 2
await ask({ type: SETUP, data: { ...index, options: {} } })
for (const query of fs.readFileSync(0, "utf8").trim().split("\n")) {
  const { data } = await ask({ type: QUERY, data: query })
  console.log(JSON.stringify(data.items.map(found => {
    const [first, ...sections] = found
    const shown = sections.filter(entry => entry.score >= first.score)
    return { page: first.location, shown: shown.map(entry => entry.location) }
  })))
}
