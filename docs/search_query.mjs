// The order of what the site's search finds. Material's worker finds all entries that have
// one of the asked words; which pages come first, and which sections of each stand
// below it, is decided here, by how rare the words are and where an entry has them.
const STOP = new Set(`a about after all already also am an and any are as at be been
  before but by can could did do does doing for from get gets go got had has have how i
  if in into is it its jax jnp just lax like make many me much my need needs no not of on
  or other our out over see should so some than that the their them then there these
  they this to too use used uses using want was we were what when where which while who
  why will with without work works would you your`.split(/\s+/))

// Words for one thing, a line each.
const SAME = `memory oom vram ram
  float16 half
  bfloat16 half
  falls drops decreases shrinks collapses halves reduces lower
  increase grow
  learn plateau stall converge
  disable off exclude
  manually hand
  nan finite infinity inf
  infinite inf overflow
  llm gpt language
  slow fast speed speedup
  several multi multiple
  weights parameters
  explode diverge
  amp autocast
  wandb log tensorboard
  save restore load checkpoint
  resume restart
  port migrate coming convert switch
  compared difference versus vs
  rope rotary
  conv convolution
  ema average
  freeze frozen
  error raises message`.split("\n").map(line => line.trim().split(" ").map(stem))

const TITLE = 2 // what a word in a title counts, where at most 1 is one in the text,
const TAGS = 2 // in the page's tags,
const PAGE = 0.8 // and for a section in its page's title
const SYNONYM = 0.6
const LONGER = 0.4 // a word that begins with the asked one
const MISTYPED = 0.8
const PAIR = 0.3 // two asked words beside each other
// Of the first page three sections are shown, of the others two: so two pages fit.
const shown = place => (place ? 2 : 3)

// What a word shares with its other forms: skipped, skips, skipping; fp16, f16, float16.
function stem(word) {
  const dtype = word.match(/^(b?)(?:f|fp|float)(\d+)$/)
  if (dtype) return `${dtype[1]}float${dtype[2]}`
  if (!/^[a-z]{4,}$/.test(word) || word.endsWith("ss")) return word
  const short = word.replace(/(ing|ies|ied|ed|er|es|s|y|e)$/, "")
  return short.length < 3 ? word : short.replace(/([^s])\1$/, "$1")
}

function parts(text) {
  const plain = text.toLowerCase().replace(/'s\b/g, "")
  return plain.split(/[\s?!,;:()[\]{}"'`=~^+/<>|*#@&’-]+|\.(?!\d)|(?<!\d)\./).filter(Boolean)
}

const pairs = words => words.slice(1).map((word, i) => `${words[i]} ${word}`)

// How often each word and each pair of words is in a text.
function counts(text) {
  const names = parts(text.replace(/<[^>]*>|&\w+;/g, " "))
  const words = names.map(stem)
  const within = names.filter(name => name.includes("_")).flatMap(name => name.split("_").map(stem))
  const map = new Map()
  for (const word of [...words, ...pairs(words), ...within]) map.set(word, (map.get(word) ?? 0) + 1)
  return map
}

// The entries of the site's index, by location, and in how many of them each word is.
function indexed(docs) {
  const entries = new Map()
  const known = new Map()
  for (const { location, title, text, tags = [] } of docs) {
    const page = entries.get(location.split("#")[0])
    const entry = { title: counts(title), text: counts(text) }
    entry.page = page ?? { title: new Map(), tags: counts(tags.join(" . ")) }
    entry.tags = entry.page.tags
    entries.set(location, entry)
    const words = [entry.title, entry.text, ...(page ? [] : [entry.tags])]
    for (const word of new Set(words.flatMap(map => [...map.keys()]))) {
      known.set(word, (known.get(word) ?? 0) + 1)
    }
  }
  const sizes = [...entries.values()].map(entry => entry.text.size)
  return { entries, known, size: sizes.reduce((sum, size) => sum + size) / sizes.length }
}

// The words of a question without those that every question has, and numbers.
function words(question) {
  const all = parts(question)
  // A flag of JAX is mostly written without its prefix: jax_debug_nans, jax.debug_nans.
  const flags = all.filter(part => part.startsWith("jax_")).map(part => part.slice(4))
  const rest = [...all, ...flags].filter(word => !STOP.has(word) && !/^\d+$/.test(word))
  return [...new Set((rest.length ? rest : all).map(stem))]
}

// Whether one letter was forgotten, added, or changed: infernce, optimiser.
function mistyped(word, other) {
  if (word.length < 5 || Math.abs(word.length - other.length) > 1) return false
  let start = 0
  while (start < word.length && word[start] === other[start]) start += 1
  const ends = [[1, 1], [1, 0], [0, 1]]
  return ends.some(([one, two]) => word.slice(start + one) === other.slice(start + two))
}

// All forms of an asked word, and what each counts.
function formsOf(word, all, known) {
  const forms = new Map([[word, 1]])
  const others = [...known.keys()].filter(form => form !== word && !form.includes(" "))
  const longer = word.length > 2 ? others.filter(form => form.startsWith(word)) : []
  for (const form of longer) {
    forms.set(form, LONGER * Math.min(1, word.length / form.length + 0.2))
  }
  if (!known.has(word) && !longer.length) {
    for (const form of others) if (mistyped(word, form)) forms.set(form, MISTYPED)
  }
  for (const line of SAME.filter(line => line.includes(word))) {
    for (const form of line) if (form !== word) forms.set(form, SYNONYM)
  }
  all.slice(1).forEach((next, i) => {
    if (word === next || word === all[i]) forms.set(all[i] + next, 1) // batch norm: batchnorm
  })
  return forms
}

// What is asked for: each word with its forms, and how rare it is. A name says more.
function asked(question, { entries, known }) {
  const rare = (...forms) => {
    const count = Math.max(0, ...forms.map(form => known.get(form) ?? 0))
    return count ? Math.log(1 + entries.size / count) : 0
  }
  const all = parts(question).map(stem)
  const single = words(question).map(word => {
    const forms = formsOf(word, all, known)
    const found = known.has(word) ? rare(word) : rare(...forms.keys())
    return { word, forms, rare: word.includes("_") ? 2 * found : found }
  })
  const kept = new Set(single.map(({ word }) => word))
  const double = pairs(all).filter(pair => pair.split(" ").every(word => kept.has(word)))
  return [
    ...single,
    ...double.map(pair => ({ word: "", forms: new Map([[pair, 1]]), rare: PAIR * rare(pair) })),
  ]
}

// What the worker is asked, which finds all words that begin with one of these. Not the
// search's own query language, which someone may use: +word, "words", field:word, word~1,
// word^2. But a message may have colons and quotes.
function shortened(question, index) {
  if (/(^|\s)\+\w|^"[^"]*"$|(^|\s)(title|text|tags):\w|\w[~^]\d/.test(question)) return question
  const forms = asked(question, index).flatMap(({ word, forms }) => {
    return [...forms.keys()].filter(form => word && (form === word || !form.startsWith(word)))
  })
  return [...new Set(forms)].join(" ")
}

function score(entry, asks, size) {
  const best = (map, forms) => {
    let most = 0
    for (const [form, counts] of forms) if (counts > most && map.has(form)) most = counts
    return most
  }
  let sum = 0
  for (const { forms, rare } of asks) {
    let often = 0
    for (const [form, counts] of forms) often += counts * (entry.text.get(form) ?? 0)
    const text = often / (often + 0.4 + (0.4 * entry.text.size) / size)
    const page = Math.max(PAGE * best(entry.page.title, forms), TAGS * best(entry.tags, forms))
    sum += rare * (text + TITLE * best(entry.title, forms) + page)
  }
  return sum
}

// Pages, best first, each with its sections, best first. Material unfolds the sections
// whose score is that of their page's first entry.
function ranked(pages, question, index) {
  const asks = asked(question, index)
  const rated = pages.map(page => {
    const scored = page.map(found => {
      return { ...found, score: score(index.entries.get(found.location), asks, index.size) }
    })
    const [best, next] = scored.sort((one, other) => other.score - one.score)
    return { scored, score: best.score + (next?.score ?? 0) / 4 }
  })
  rated.sort((one, other) => other.score - one.score)
  return rated.map(({ scored }, place) => {
    const sections = scored.filter(({ location }) => location.includes("#"))
    const first = scored.find(({ location }) => !location.includes("#"))
    return [first, ...sections].map((found, i) => ({ ...found, score: +(i <= shown(place)) }))
  })
}

const QUERY = 2, RESULT = 3 // the types of messages to and from the search worker
const { postMessage } = Worker.prototype
const { get } = Object.getOwnPropertyDescriptor(MessageEvent.prototype, "data")
const questions = [] // that the worker has not answered
const answers = new WeakSet()
let index
fetch(new URL("search/search_index.json", import.meta.url))
  .then(file => file.json())
  .then(({ docs }) => (index = indexed(docs)))
Worker.prototype.postMessage = function (message, ...rest) {
  if (message?.type !== QUERY) return postMessage.call(this, message, ...rest)
  questions.push(message.data)
  const data = index ? shortened(message.data, index) : message.data
  return postMessage.call(this, { ...message, data }, ...rest)
}
// Material listens before this file runs, so its events themselves have the new order.
Object.defineProperty(MessageEvent.prototype, "data", {
  get() {
    const answer = get.call(this)
    if (this.target instanceof Worker && answer?.type === RESULT && !answers.has(answer)) {
      answers.add(answer)
      const question = questions.shift()
      if (index) answer.data.items = ranked(answer.data.items, question, index)
    }
    return answer
  },
})
