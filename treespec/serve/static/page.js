"use strict";
// Text of the model reaches the page only by textContent and setAttribute; the
// Content-Security-Policy forbids every other script, style and address.
const by = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
let conversation = [];
let running = null;

function element(tag, text, kind) {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
}

function chance(value) {
  if (value === null || value === undefined) return "unknown";
  return value > 0 && value < 0.005 ? "< 0.01" : value.toFixed(2);
}

// 1. The choices of verifier and tree.
async function call(path, body, signal) {
  const headers = {"Content-Type": "application/json"};
  if (by("key").value) headers.Authorization = "Bearer " + by("key").value;
  const options = {headers, signal};
  if (body) Object.assign(options, {method: "POST", body: JSON.stringify(body)});
  const response = await fetch(path, options);
  if (response.ok) return response;
  let told = "the server answered with status " + response.status;
  try { told = (await response.json()).error.message; } catch { /* no JSON: the status says it */ }
  if (response.status === 401) {
    by("key-label").hidden = false;
    by("settings").open = true;
  }
  throw new Error(told);
}

function choices(select, names, own) {
  const first = element("option", own ? "as started: " + own : "the default");
  first.value = "";
  select.replaceChildren(first, ...names.map((name) => element("option", name)));
}

async function setUp() {
  const known = await (await call("/cycles")).json();
  by("model").textContent = `${known.model}, ${known.drafting}`;
  choices(by("verifier"), known.verifiers, known.verifier);
  choices(by("tree"), known.trees, known.tree);
  by("most").max = known.max_tokens;
  by("drafts").checked = known.drafts;
  for (const id of ["drafts", "verifier", "tree"]) by(id).disabled = !known.drafts;
  return known;
}

function begin() {
  for (const old of document.querySelectorAll("#log > .error")) old.remove();
  setUp().catch((error) => by("log").append(element("p", String(error.message), "error")));
}

// 2. Stream an answer, cycle by cycle.
async function* cycles(body, signal) {
  const response = await call("/cycles", body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {done, value} = await reader.read();
    if (done) throw new Error("the server closed the connection mid-answer");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      const data = event.slice(6);
      if (data === "[DONE]") return;
      const told = JSON.parse(data);
      if (told.error) throw new Error(told.error.message);
      yield told;
    }
  }
}

function number(id) {
  return by(id).value === "" ? null : Number(by(id).value);
}

async function ask(text) {
  // 1. Add the turn to the page.
  const before = conversation;
  const log = by("log"), answer = element("div", "", "turn answer");
  const words = element("span", ""), figures = element("div", "", "figures");
  answer.append(words, figures);
  log.append(element("div", text, "turn user"), answer);
  show(0);
  const messages = [...before, {role: "user", content: text}];
  running = new AbortController();
  by("send").hidden = true;
  by("stop").hidden = false;

  // 2. Show its cycles as they arrive.
  const drafts = by("drafts").checked;
  const body = {messages, drafts};
  body.temperature = number("temperature") ?? 0;
  body.max_tokens = number("most") ?? 256;
  if (number("seed") !== null) body.seed = number("seed");
  if (drafts && by("verifier").value) body.verifier = by("verifier").value;
  if (drafts && by("tree").value) body.tree = by("tree").value;
  const how = drafts ? [by("verifier"), by("tree")].map((one) => one.selectedOptions[0].textContent)
    .map((name) => name.replace("as started: ", "")).join(", ") : "one token at a time";
  let said = "", count = 0, seconds = 0, last = null;
  try {
    for await (const cycle of cycles(body, running.signal)) {
      const below = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
      for (const part of parts(cycle)) {
        if (part.text) words.append(token(part));
        said += part.text;
        count += part.tokens.length;
      }
      // The prefill is not counted; the head's seconds are part of the drafter's.
      for (const stage of ["draft", "target", "verify", "commit"]) seconds += cycle.seconds[stage];
      last = cycle;
      const tau = (count / cycle.number).toFixed(2), rate = (count / seconds).toFixed(1);
      show(count, tau, rate);
      figures.textContent = `${count} tokens · τ ${tau} · ${rate} tokens/s · ${how}`;
      draw(drafts ? cycle : null);
      if (below) log.scrollTop = log.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") answer.append(element("p", String(error.message), "error"));
  }

  // 3. Keep the turn in the conversation.
  if (last && conversation === before) {
    conversation = [...messages, {role: "assistant", content: said.trim()}];
  }
  if (!last && !said) figures.textContent = "no answer";
  running = null;
  by("send").hidden = false;
  by("stop").hidden = true;
}

function show(tokens, tau = "–", rate = "–") {
  by("tau").textContent = tau;
  by("rate").textContent = rate;
  by("tokens").textContent = tokens || "–";
}

// The parts that a cycle adds to the answer: one per token. If a character spans several tokens, they
// are one part.
function parts(cycle) {
  const rest = cycle.path.map((node) => ({text: cycle.texts[node], shown: cycle.shown[node],
                                          p: cycle.p[node], q: cycle.q[node]}));
  rest.push(cycle.own);
  return cycle.answer.flatMap((piece) => {
    const tokens = rest.splice(0, piece.token_ids.length), drafted = piece.drafted;
    const alone = tokens.map((one) => one.text).join("") === piece.text;
    return alone ? tokens.map((one) => ({text: one.text, drafted, tokens: [one]}))
      : [{text: piece.text, drafted, tokens}];
  });
}

function chances(of) {
  return `${of.shown}   draft ${chance(of.q)}   target ${chance(of.p)}`;
}

function token(part) {
  const span = element("span", part.text, part.drafted ? "token drafted" : "token");
  const head = part.drafted ? "drafted, accepted" : "the target's own token";
  if (part.tokens.length) span.dataset.tip = [head, ...part.tokens.map(chances)].join("\n");
  return span;
}

// 3. Show probabilities next to the pointer, or next to the token that the arrow keys selected.
function tip(of) {
  const text = of?.dataset?.tip;
  by("tip").hidden = !text;
  if (!text) return;
  by("tip").textContent = text;
  const place = of.getBoundingClientRect(), size = by("tip").getBoundingClientRect();
  const left = Math.max(4, Math.min(place.left, innerWidth - size.width - 4));
  const above = place.top - size.height - 4;
  by("tip").style.left = left + "px";
  by("tip").style.top = (above > 4 ? above : place.bottom + 4) + "px";
}

function choose(step) {
  const all = [...document.querySelectorAll(".token[data-tip]")];
  const at = all.findIndex((one) => one.classList.contains("chosen"));
  if (at >= 0) all[at].classList.remove("chosen");
  if (!step || !all.length) return tip(null);
  const last = all.length - 1, first = step > 0 ? 0 : last;
  const next = all[at < 0 ? first : Math.max(0, Math.min(last, at + step))];
  next.classList.add("chosen");
  next.scrollIntoView({block: "nearest"});
  tip(next);
}

document.addEventListener("pointerover", (event) => tip(event.target.closest?.("[data-tip]")));
document.addEventListener("click", (event) => tip(event.target.closest?.("[data-tip]")));
by("log").addEventListener("keydown", (event) => {
  const step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
  if (step) { event.preventDefault(); choose(step); }
});
by("log").addEventListener("blur", () => choose(0));

// 4. The tree: levels from left to right, leaves from top to bottom.
function drawn(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

function draw(tree) {
  by("picture").replaceChildren();
  if (!tree) {
    by("why").textContent = "One token at a time: nothing is drafted.";
    return;
  }
  // 1. List the nodes, then the token sampled from the target; parents come before children.
  const nodes = tree.shown.map((shown, i) => {
    const kind = i === 0 || tree.path.includes(i) ? "kept" : "";
    return {shown, parent: tree.parents[i], q: tree.q[i], p: tree.p[i], kind};
  });
  nodes.push({...tree.own, parent: tree.own.at, kind: "own"});
  nodes.forEach((node) => { node.children = []; });
  nodes.forEach((node, i) => {
    node.depth = i ? nodes[node.parent].depth + 1 : 0;
    if (i) nodes[node.parent].children.push(node);
  });

  // 2. Position them: a leaf takes a row, a parent the middle of its children.
  let rows = 0;
  (function place(node) {
    node.children.forEach(place);
    const ends = node.children;
    node.row = ends.length ? (ends[0].row + ends[ends.length - 1].row) / 2 : rows++;
  })(nodes[0]);
  const depth = Math.max(...nodes.map((node) => node.depth));
  const room = by("picture").clientWidth / (depth + 1);
  const wide = Math.max(64, Math.min(92, room)), high = 24, box = wide - 14;
  const x = (node) => 4 + node.depth * wide, y = (node) => 4 + node.row * high;
  const svg = drawn("svg", {width: depth * wide + box + 8, height: rows * high + 8,
                             role: "img", "aria-label": tree.explained});

  // 3. Draw edges below nodes.
  for (const node of nodes.slice(1)) {
    const above = nodes[node.parent], from = x(above) + box, to = x(node), middle = (from + to) / 2;
    const start = y(above) + 10, end = y(node) + 10;
    const d = `M${from} ${start}C${middle} ${start} ${middle} ${end} ${to} ${end}`;
    svg.append(drawn("path", {d, class: node.kind}));
  }
  for (const node of nodes) {
    const group = drawn("g", {class: node.kind, transform: `translate(${x(node)} ${y(node)})`});
    const label = drawn("text", {x: 6, y: 14.5}), letters = [...node.shown];
    const most = Math.floor((box - 10) / 7.3);
    const cut = letters.slice(0, most - 1).join("") + "…";
    label.textContent = letters.length > most ? cut : node.shown;
    group.append(drawn("rect", {width: box, height: 20, rx: 5}), label);
    if (node !== nodes[0]) group.dataset.tip = chances(node);
    svg.append(group);
  }
  by("picture").append(svg);
  const own = nodes[nodes.length - 1], centre = (y(nodes[0]) + y(own)) / 2;
  by("picture").scrollTop = centre - by("picture").clientHeight / 2;
  by("picture").scrollLeft = x(own) + box - by("picture").clientWidth;
  by("why").textContent = tree.explained;
}

// 5. Keys and buttons.
by("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = by("message").value.trim();
  if (!text || running) return;
  by("message").value = "";
  ask(text);
});
by("message").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  by("ask").requestSubmit();
});
by("message").addEventListener("input", () => {
  by("message").style.height = "auto";
  by("message").style.height = by("message").scrollHeight + "px";
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
by("stop").addEventListener("click", () => running?.abort());
by("fresh").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  by("log").replaceChildren();
  by("message").focus();
});
by("drafts").addEventListener("change", () => {
  for (const id of ["verifier", "tree"]) by(id).disabled = !by("drafts").checked;
});
by("how").addEventListener("submit", (event) => event.preventDefault());
by("key").addEventListener("change", begin);
if (matchMedia("(max-width: 56rem)").matches) by("settings").open = false;
begin();
