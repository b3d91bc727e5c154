// Chat with the model while its trees are drawn. All text from outside goes in as text, never as markup.
"use strict";

const byId = (id) => document.getElementById(id);
const COLOURS = { draft: "#3a8f5c", network: "#7f8c8d", queue: "#8e44ad", wait: "#c0392b", compute: "#2471a3", other: "#b7950b" };
const MEANING = { draft: "growing", network: "network", queue: "waiting for a sweep", wait: "waiting for weights", compute: "computing", other: "orchestrator" };
const turns = [];
let rounds = [], requestId = "", running = null;

function made(tag, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  return element;
}

function drawn(tag, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

function headers() {
  const key = byId("key").value;
  const all = { "content-type": "application/json" };
  if (key) all.authorization = `Bearer ${key}`;
  return all;
}

async function told(path) {
  const reply = await fetch(path, { headers: headers() });
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error ? body.error.message : reply.statusText);
  return body;
}

// Server-sent events of one answer, as objects.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function ask(question) {
  turns.push({ role: "user", content: question });
  byId("turns").append(made("p", question, "turn user"));
  const answer = byId("turns").appendChild(made("p", undefined, "turn assistant"));
  rounds = [];
  running = new AbortController();
  const body = {
    messages: turns, stream: true, stream_options: { include_usage: true, include_rounds: true },
    max_completion_tokens: Number(byId("length").value), temperature: Number(byId("temperature").value),
    speculation: byId("speculation").checked,
  };
  let text = "";
  try {
    const reply = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(body), signal: running.signal });
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const chunk of events(reply)) {
      if (chunk.error) throw new Error(chunk.error.message);
      requestId = chunk.id;
      for (const choice of chunk.choices) text += choice.delta.content || "";
      const round = chunk.metrics && chunk.metrics.round;
      if (round) {
        rounds.push(round);
        round.texts.forEach((piece, i) => answer.append(made("span", piece, round.drafted[i] ? "guessed" : "own")));
        show(round);
      }
    }
    if (answer.textContent.length < text.length) answer.append(text.slice(answer.textContent.length));
  } catch (problem) {
    if (problem.name !== "AbortError") throw problem;
  } finally {
    turns.push({ role: "assistant", content: text });
    running = null;
  }
}

function show(round) {
  drawTree(round);
  drawRounds();
  const tokens = rounds.reduce((sum, one) => sum + one.texts.length, 0);
  const seconds = rounds.reduce((sum, one) => sum + one.seconds.total, 0);
  const later = rounds.slice(1);
  const rate = later.reduce((sum, one) => sum + one.texts.length, 0) / later.reduce((sum, one) => sum + one.seconds.total, 0);
  byId("shape").textContent = `${round.nodes} nodes, ${round.depth} levels below the root, ${round.accepted.length} kept`;
  const figures = {
    "tokens per second": later.length ? rate.toFixed(2) : "…", "tokens per round": (tokens / rounds.length).toFixed(2),
    "seconds of a round": (seconds / rounds.length).toFixed(2), "rounds": rounds.length,
  };
  byId("figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const pair = made("div");
    pair.append(made("dt", name), made("dd", String(value)));
    return pair;
  }));
  const parts = Object.keys(COLOURS);
  byId("split").replaceChildren(...parts.map((name) => {
    const part = made("span");
    part.style.cssText = `background:${COLOURS[name]};width:${100 * round.seconds[name] / round.seconds.total}%`;
    return part;
  }));
  byId("legend").replaceChildren(...parts.map((name) => {
    const entry = made("li");
    entry.append(made("i"), `${MEANING[name]} ${(1000 * round.seconds[name]).toFixed(0)} ms`);
    entry.firstChild.style.background = COLOURS[name];
    return entry;
  }));
}

// Depth goes from left to right; the leaves share the height, and a parent stands amid its children.
function drawTree(round) {
  const parents = round.parents, count = parents.length, depth = [], rows = [], children = parents.map(() => []);
  parents.forEach((parent, node) => { depth[node] = parent < 0 ? 0 : depth[parent] + 1; if (parent >= 0) children[parent].push(node); });
  let leaves = 0;
  const place = (node) => {
    const below = children[node].map(place);
    rows[node] = below.length ? (below[0] + below[below.length - 1]) / 2 : leaves++;
    return rows[node];
  };
  if (count) place(0);
  const width = 500, height = 176, levels = Math.max(1, ...depth);
  const at = (node) => [12 + depth[node] * (width - 24) / levels, 10 + (rows[node] + .5) * (height - 20) / Math.max(1, leaves)];
  const kept = new Set([0, ...round.accepted]), tree = byId("tree");
  tree.setAttribute("viewBox", `0 0 ${width} ${height}`);
  tree.replaceChildren();
  const colour = (node) => kept.has(node) ? "var(--draft)" : "var(--line)";
  for (let node = 1; node < count; node++) {
    const [x, y] = at(node), [px, py] = at(parents[node]);
    tree.append(drawn("line", { x1: px, y1: py, x2: x, y2: y, stroke: colour(node), "stroke-width": kept.has(node) ? 2 : 1 }));
  }
  for (let node = 0; node < count; node++) {
    const [x, y] = at(node);
    tree.append(drawn("circle", { cx: x, cy: y, r: kept.has(node) ? 4 : 2.2, fill: colour(node) }));
  }
}

function drawRounds() {
  const picture = byId("rounds"), last = rounds.slice(-60), width = 500, height = 96;
  const most = Math.max(...last.map((one) => one.nodes)), step = width / 60;
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  picture.replaceChildren(...last.flatMap((one, i) => {
    const bar = (value, fill) => {
      const tall = Math.max(1, value / most * (height - 8));
      return drawn("rect", { x: i * step + 1, y: height - tall, width: step - 2, height: tall, fill });
    };
    return [bar(one.nodes, "var(--line)"), bar(one.texts.length, "var(--draft)")];
  }));
}

function fill(table, names, rows) {
  const head = made("tr");
  head.append(...names.map((name) => made("th", name)));
  table.replaceChildren(head, ...rows.map((cells) => {
    const row = made("tr");
    row.append(...cells.map((cell) => made("td", String(cell))));
    return row;
  }));
}

async function why() {
  const decisions = await told(`/decisions/${encodeURIComponent(requestId)}`);
  const rounded = (value) => value.toFixed(2);
  const total = (parts) => Object.values(parts).reduce((sum, one) => sum + one, 0);
  fill(byId("decisions"), ["round", "why", "grown", "sent", "tokens expected", "came", "seconds expected", "came", "tokens/s drafting", "plain"],
    decisions.slice(-12).map((one) => [one.number, one.mode, one.num_grown, one.num_sent, rounded(one.expected_tokens), one.tokens,
      rounded(total(one.expected)), rounded(total(one.seconds)), rounded(one.draft_rate), rounded(one.plain_rate)]));
}

async function watchCluster() {
  const cluster = await told("/cluster");
  const megabytes = (bytes) => (bytes / 1e6).toFixed(0);
  byId("model").textContent = [...new Set(cluster.workers.map((one) => one.info).filter((one) => one.kind === "target").map((one) => one.model_name))].join(", ");
  fill(byId("workers"), ["", "at", "model", "sessions", "KV MB used / all", "passes", "state"],
    cluster.workers.map(({ address, info, problem }) => [info.kind, address, `${info.model_name} (${info.model_description})`,
      info.num_sessions, `${megabytes(info.kv_used_bytes)} / ${megabytes(info.kv_bytes)}`, info.num_passes, problem || "in use"]));
  if (cluster.index_problem) byId("problem").textContent = cluster.index_problem;
}

function guarded(act) {
  return async (event) => {
    event && event.preventDefault();
    byId("problem").textContent = "";
    try { await act(); } catch (problem) { byId("problem").textContent = problem.message; }
  };
}

byId("ask").addEventListener("submit", guarded(async () => {
  const question = byId("question").value.trim();
  if (!question || running) return;
  byId("question").value = "";
  byId("send").disabled = true;
  byId("stop").disabled = byId("why").disabled = false;
  try { await ask(question); } finally { byId("send").disabled = false; byId("stop").disabled = true; }
}));
byId("stop").addEventListener("click", () => running && running.abort());
byId("why").addEventListener("click", guarded(why));
byId("key").addEventListener("change", guarded(watchCluster));
guarded(watchCluster)();
setInterval(() => { if (!document.hidden) watchCluster().catch(() => {}); }, 5000);
