// Asks the site's own search worker: node docs/search_check.mjs SITE < queries
// Reads one query a line; prints one line of JSON for each: the pages found, best first,
// and the sections that stand unfolded below each, as search_query.mjs orders them.
import fs from "node:fs"
import path from "node:path"
import vm from "node:vm"
import { indexed, ranked, shortened, shown } from "./search_query.mjs"

const site = process.argv[2]
const workers = path.join(site, "assets/javascripts/workers")
const worker = fs.readdirSync(workers).find(name => /^search\..*\.js$/.test(name))
const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json")))

let listen, answer
const scope = {
  console: { warn() {} },
  addEventListener: (_, listener) => (listen = listener),
  postMessage: message => answer(message),
}
scope.self = scope
vm.runInNewContext(fs.readFileSync(path.join(workers, worker), "utf8"), scope)
const ask = data => new Promise(done => { answer = done; listen({ data }) })

const SETUP = 0, QUERY = 2
await ask({ type: SETUP, data: { ...index, options: {} } })
const entries = indexed(index.docs)
for (const query of fs.readFileSync(0, "utf8").trim().split("\n")) {
  const { data } = await ask({ type: QUERY, data: shortened(query, entries) })
  const pages = ranked(data.items, query, entries).map(([first, ...sections], place) => ({
    page: first.location.split("#")[0],
    shown: sections.slice(0, shown(place)).map(entry => entry.location),
  }))
  console.log(JSON.stringify(pages))
}
