// Asks the site's search as a browser does: node docs/search_check.mjs SITE < queries
// Reads one query a line; prints one line of JSON for each: the pages found, best first,
// and the sections that stand unfolded below each.
import fs from "node:fs"
import path from "node:path"
import vm from "node:vm"

const site = process.argv[2]
const read = name => fs.readFileSync(path.join(site, name), "utf8")
let send, answer
const worker = vm.createContext({
  importScripts: name => vm.runInContext(read(name), worker),
  addEventListener: (_, listener) => (send = data => listener({ data })),
  postMessage: data => (answer = data),
})
vm.runInContext(read("search_worker.js"), worker)

const SETUP = 0, QUERY = 2
send({ type: SETUP, data: JSON.parse(read("search/search_index.json")) })
for (const query of fs.readFileSync(0, "utf8").trim().split("\n")) {
  send({ type: QUERY, data: query })
  console.log(JSON.stringify(answer.data.items.map(([page, ...sections]) => {
    const shown = sections.filter(entry => entry.score >= page.score)
    return { page: page.location, shown: shown.map(entry => entry.location) }
  })))
}
