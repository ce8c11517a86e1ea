// The site's search, in place of Material's own worker, whose messages it answers:
// MiniSearch finds sections, which are shown below their pages.
importScripts("minisearch.js")

const SETUP = 0, READY = 1, QUERY = 2, RESULT = 3
// What a word counts in a section's title and text, in its page's title, and in the
// words of search_words.yml for both.
const FIELDS = { title: 2, text: 1, page: 1, tags: 2 }
// Sections below the first page and each other, so that two pages are seen at once.
const SHOWN = [3, 2]
const EXCERPT = 200
// Words of questions that say nothing about the answer.
const STOP = new Set(`a about after all already also am an and any are as at be been
  before but by can could did do does doing for from get gets go got had has have how i
  if in into is it its jax jnp just lax library like make many me much my need needs no not
  of on once or other our out over see should so some than that the their them then there
  these they this to too use used uses using want was we were what when where which while who
  why will with without work works would you your`.split(/\s+/))

// Words of nearly every page and question here, which say little.
const COMMON = new Set(`training train trained precision mixed half float16 bfloat16
  float32 model amp autocast`.split(/\s+/))

const entries = new Map() // sections and pages of the index, by location
const pageOf = entry => entries.get(entry.location.split("#")[0])
const plain = html => html.replace(/<[^>]*>|&\w+;/g, " ")

const search = new MiniSearch({
  idField: "location",
  fields: Object.keys(FIELDS),
  extractField(entry, field) {
    const page = pageOf(entry)
    if (field === "page") return entry === page ? "" : plain(page.title)
    if (field === "tags") {
      const own = entry === page ? [] : entry.tags ?? []
      return [...(page.tags ?? []), ...own].join(" . ")
    }
    return field === "location" ? entry.location : plain(entry[field])
  },
  processTerm(term) {
    const word = term.toLowerCase().replace(/^(b?)(?:f|fp|float)(\d+)$/, "$1float$2")
    return STOP.has(word) ? null : word
  },
  searchOptions: {
    boost: FIELDS,
    bm25: { k: 0.6, b: 0.4, d: 0.5 }, // sections are short, and lists of tags long
    boostTerm: word => COMMON.has(word) ? 0.3 : 1,
    boostDocument: location => location.startsWith("api/") ? 0.6 : 1, // guides come first
    prefix: word => word.length > 3,
    fuzzy: word => word.length > 4 && 0.2,
  },
})

addEventListener("message", ({ data: { type, data } }) => {
  if (type === SETUP) {
    for (const entry of data.docs) entries.set(entry.location, entry)
    search.addAll(data.docs)
    postMessage({ type: READY })
  } else if (type === QUERY) postMessage({ type: RESULT, data: { items: pages(data) } })
})

// The pages found, best first: each is its own entry, then its sections, best first.
function pages(question) {
  const found = new Map()
  for (const hit of search.search(question)) {
    const page = pageOf(entries.get(hit.id))
    found.set(page, [...(found.get(page) ?? []), hit])
  }
  const score = ([best, next]) => best.score + (next?.score ?? 0) / 4
  const ranked = [...found].sort(([, one], [, other]) => score(other) - score(one))
  return ranked.map(([page, hits], place) => {
    const own = hits.find(({ id }) => id === page.location) ?? { id: page.location, terms: [] }
    const sections = hits.filter(hit => hit !== own)
    return [own, ...sections].map((hit, i) => shown(hit, i <= SHOWN[Math.min(place, 1)]))
  })
}

// An entry as Material shows it: unfolded if it scores as much as its page's own entry.
function shown({ id, terms }, unfolded) {
  const { location, title, text } = entries.get(id)
  const literal = terms.map(term => term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"))
  const words = terms.length ? new RegExp(`(?<!\\w)(?:${literal.join("|")})`, "gi") : /(?!)/g
  return {
    location,
    title: marked(plain(title), words),
    text: marked(excerpt(plain(text).trim(), words), words),
    score: Number(unfolded),
    terms: Object.fromEntries(terms.map(term => [term, true])),
  }
}

const marked = (text, words) => text.replace(words, "<mark data-md-highlight>$&</mark>")

// The part of a text that begins shortly before the first of the words.
function excerpt(text, words) {
  if (text.length <= EXCERPT) return text
  const start = text.lastIndexOf(" ", Math.max(0, text.search(words) - 30)) + 1
  const end = start + EXCERPT
  return (start ? "…" : "") + text.slice(start, end) + (end < text.length ? "…" : "")
}
