// What the site's search is asked: a question without the words that every question has.
// Material looks for each word as the beginning of others, so "in" would find `init`
// and `install`, and "checkpoints" would not find "checkpoint".
const STOP = new Set(`a about after all already also am an and any are as at be been
  before but by can could did do does doing for from get gets go had has have how i if
  in into is it its jax jnp just lax like make many me much my need needs no not of on
  or other our out over see should so some than that the their them then there these
  they this to too use used uses using want was we were what when where which while who
  why will with without work works would you your`.split(/\s+/))

// What the pages call by another word, both as `stem` returns them.
const SAME = new Map(Object.entries({
  oom: "memory",
  vram: "memory",
  fp32: "float32",
  f32: "float32",
  fp16: "float16",
  f16: "float16",
  bf16: "bfloat16",
  collaps: "fall",
  collapse: "fall",
  decreas: "fall",
  decrease: "fall",
  drop: "fall",
  halv: "fall",
  shrink: "fall",
  plateau: "learn",
  stall: "learn",
}))

// The beginning that a word shares with its other forms: skipped, skips, skipping.
function stem(word) {
  if (!/^[a-z]{5,}$/.test(word) || word.endsWith("ss")) return word
  const short = word.replace(/(ing|ies|ed|es|s)$/, "")
  return short.length < 4 ? word : short.replace(/(.)\1$/, "$1")
}

export function shortened(question) {
  // The search's own query language: +word, "words", field:word, word~1, word^2. Not the
  // colons and quotes of a message, or the dashes of a flag, that someone pastes.
  if (/(^|\s)\+\w|^"[^"]*"$|(^|\s)(title|text|tags):\w|\w[~^]\d/.test(question)) return question
  const plain = question.toLowerCase().replace(/'s\b/g, "")
  const parts = plain.split(/[\s?!,;:()[\]"'`=~^+-]+|\.(?!\d)/).filter(Boolean)
  // A flag of JAX is mostly written without its prefix: jax_debug_nans, jax.debug_nans.
  const flags = parts.filter(part => part.startsWith("jax_")).map(part => part.slice(4))
  const words = [...parts, ...flags].map(stem).map(word => SAME.get(word) ?? word)
  // Numbers say little, and lunr.js, which mixes up some words that end in digits, finds
  // nothing at all with some of them.
  const rest = words.filter(word => !STOP.has(word) && !/^\d+$/.test(word))
  // In a message the function that raises it, "HealthLog: expected ...", and the kind of a
  // finding, "[half-sum]", count most. A name, ragged_dot, says more than a word.
  const named = plain.match(/[\w.]+(?=: expected )|\[[a-z][a-z -]+\]/g) ?? []
  const names = new Set(named.join(" ").split(/[^\w]+/).map(stem))
  // Twice: as a whole word, which counts more, and as the beginning of others.
  const asked = (rest.length ? rest : words).map(word => {
    const whole = `${word}^${names.has(word) ? 20 : word.includes("_") ? 10 : 2}`
    return word.length > 1 ? `${whole} ${word}` : whole
  })
  return asked.join(" ")
}

// Pages, best first: a page counts as its best entry does, whose score counts by the share
// of the asked words that it has. One word in a title is not what a long question asks.
export function ranked(pages) {
  const share = ({ terms }) => {
    const has = Object.values(terms)
    return has.filter(Boolean).length / Math.max(1, has.length)
  }
  const best = entries => Math.max(...entries.map(entry => entry.score * share(entry)))
  return pages.toSorted((one, other) => best(other) - best(one))
}

const QUERY = 2, RESULT = 3 // the types of messages to and from the search worker
if (typeof Worker !== "undefined") {
  const { postMessage, addEventListener } = Worker.prototype
  Worker.prototype.postMessage = function (message, ...rest) {
    const asks = message?.type === QUERY && typeof message.data === "string"
    const sent = asks ? { ...message, data: shortened(message.data) } : message
    return postMessage.call(this, sent, ...rest)
  }
  Worker.prototype.addEventListener = function (type, listener, ...rest) {
    const heard = event => {
      const found = event.data
      if (found?.type === RESULT) found.data.items = ranked(found.data.items)
      return listener.call(this, event)
    }
    return addEventListener.call(this, type, type === "message" ? heard : listener, ...rest)
  }
}

// Material folds all sections whose score is below that of their page's first entry,
// which with tags is nearly always the page's own. The best of them are shown.
export const UNFOLDED = 2

function unfold(item) {
  const more = item.querySelector?.("details.md-search-result__more")
  if (!more) return
  const links = [...more.querySelectorAll("a.md-search-result__link")]
  more.before(...links.slice(0, UNFOLDED))
  const left = links.length - UNFOLDED
  if (left > 0) more.querySelector("summary div").textContent = `${left} more on this page`
  else more.remove()
}

if (typeof document !== "undefined") {
  const list = document.querySelector(".md-search-result__list")
  const unfoldAdded = records => records.forEach(({ addedNodes }) => addedNodes.forEach(unfold))
  if (list) new MutationObserver(unfoldAdded).observe(list, { childList: true })
}
