// The conversation, which round of which answer is shown, and whether the server can be reached.
import { byId, made } from "/ui/dom.js";
import { showDecisions, showFigures, showWorkers, summary } from "/ui/figures.js";
import { drawTree, readable } from "/ui/tree.js";

const REFRESH_MS = 3000, DECISIONS_MS = 1000;
const EXAMPLE = { // shown until there is an answer
  parents: [-1, 0, 0, 1, 1, 3, 3, 5, 2, 7, 5], tokens: ["The", " sky", " colour", " is", " looks", " blue", " clear", " because", " of", " light", " since"],
  probabilities: [1, .7, .2, .8, .15, .85, .1, .6, .8, .5, .2], accepted: [1, 3, 5, 7], drafted: [true, true, true, true, false],
  texts: [" sky", " is", " blue", " because", " sunlight"],
};

const turns = []; // {question, text, rounds, decisions, requestId, state: running | done | stopped | failed, finish, article, answer}
let shown = { turn: null, round: 0 };
let running = null; // AbortController of the answer in progress
let isFollowing = true; // the newest tree is shown as it comes
let workers = [];

// ---- The server

function headers() {
  const key = byId("key").value;
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
}

async function call(path, options = {}) {
  const reply = await fetch(path, { headers: headers(), ...options }).catch((problem) => {
    throw problem.name === "AbortError" ? problem : new Error("The server does not answer.");
  });
  if (reply.ok) return reply;
  const body = await reply.json().catch(() => ({}));
  throw Object.assign(new Error(body.error?.message ?? `${reply.status} ${reply.statusText}`), { status: reply.status });
}

const fetched = async (path) => (await call(path)).json();

// Server-sent events of one answer, as objects. A stream without its end mark was cut off.
async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch((problem) => {
      throw problem.name === "AbortError" ? problem : new Error("The connection to the server was lost.");
    });
    if (done) throw new Error("The server ended the answer early.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

async function refresh() {
  try {
    const cluster = await fetched("/cluster");
    workers = cluster.workers;
    showWorkers(workers, true);
    const isReady = workers.some((one) => one.info.kind === "target" && !one.problem);
    showStatus(isReady ? "ready" : "wait", isReady ? "ready" : "no target worker is ready", cluster.index_problem);
    byId("simulated").hidden = !workers.some((one) => one.info.model_description.startsWith("simulated"));
    if (isReady) showModels((await fetched("/v1/models")).data.map((one) => one.id));
  } catch (problem) {
    showWorkers(workers, false);
    const needsKey = problem.status === 401;
    if (needsKey && byId("key-field").hidden) {
      byId("key-field").hidden = false;
      byId("key").focus();
    }
    if (needsKey) showStatus("wait", "needs an API key", byId("key").value && problem.message);
    else if (problem.status) showStatus("dead", "error", problem.message);
    // A server that is stopped closes its port at once and finishes what it has begun.
    else if (running) showStatus("wait", "shutting down", "The server takes no new questions and finishes this answer.");
    else showStatus("dead", "no answer", `${problem.message} It is asked again every few seconds.`);
  }
}

function showStatus(state, text, problem) {
  byId("status").dataset.state = state;
  if (byId("status").textContent !== text) byId("status").textContent = text;
  byId("problem").hidden = !problem;
  if (byId("problem").textContent !== problem) byId("problem").textContent = problem;
}

function showModels(names) {
  const choice = byId("model"), before = choice.value;
  if (names.join() === [...choice.options].map((one) => one.value).join()) return;
  choice.replaceChildren(...names.map((name) => new Option(name, name)));
  choice.disabled = names.length < 2;
  if (names.includes(before)) choice.value = before;
}

// ---- The conversation

// What is sent of earlier turns: only questions that have an answer.
function history() {
  return turns.filter((turn) => turn.text && turn.state !== "failed").flatMap(({ question, text }) => [
    { role: "user", content: question }, { role: "assistant", content: text },
  ]);
}

async function ask(question) {
  const messages = [...history(), { role: "user", content: question }];
  const article = made("article"), answer = made("p", undefined, "answer");
  const turn = { question, text: "", rounds: [], decisions: [], requestId: "", state: "running", finish: "", article, answer };
  article.append(made("p", question, "question"), answer, made("div", undefined, "outcome"));
  answer.setAttribute("aria-busy", "true");
  turns.push(turn);
  byId("turns").append(turn.article);
  byId("welcome").hidden = true;
  turn.article.scrollIntoView({ block: "end" });
  isFollowing = true;
  const leaving = new AbortController();
  showRunning(leaving);
  const body = {
    model: byId("model").value || undefined, messages, stream: true, stream_options: { include_usage: true, include_rounds: true },
    max_completion_tokens: Number(byId("length").value), temperature: Number(byId("temperature").value),
    speculation: byId("speculation").checked,
  };
  try {
    const reply = await call("/v1/chat/completions", { method: "POST", body: JSON.stringify(body), signal: leaving.signal });
    for await (const chunk of events(reply)) take(turn, chunk);
    turn.state = "done";
  } catch (problem) {
    turn.state = problem.name === "AbortError" ? "stopped" : "failed";
    turn.problem = problem.message;
  } finally {
    answer.removeAttribute("aria-busy");
    if (running === leaving) showRunning(null);
    if (turns.includes(turn)) await conclude(turn);
  }
}

function take(turn, chunk) {
  if (chunk.error) throw new Error(chunk.error.message);
  turn.requestId = chunk.id;
  const isAtEnd = byId("turns").getBoundingClientRect().bottom < byId("ask").getBoundingClientRect().top + 60;
  const { answer } = turn;
  let isReasoning = false;
  for (const { delta, finish_reason } of chunk.choices) {
    turn.text += delta.content || "";
    isReasoning ||= Boolean(delta.reasoning);
    turn.finish = finish_reason || turn.finish;
  }
  const round = chunk.metrics?.round;
  if (round) {
    const index = turn.rounds.push(round) - 1;
    round.texts.forEach((text, i) => {
      const word = round.drafted[i] ? text : text.trimStart() || text; // the target's own are marked without spaces
      const span = made("span", word, `${round.drafted[i] ? "kept" : "bonus"}${isReasoning ? " reasoning" : ""}`);
      span.dataset.round = index;
      span.style.animationDelay = `${45 * i}ms`;
      answer.append(text.slice(0, text.length - word.length), span);
    });
    if (isFollowing) show(turn, bestRound(turn), index === bestRound(turn));
    learnDecisions(turn);
  }
  if (turn.finish && answer.textContent.length < turn.text.length) answer.append(turn.text.slice(answer.textContent.length));
  if (isAtEnd) turn.article.scrollIntoView({ block: "end" });
}

// The newest round with a tree: the last of an answer often has few tokens left to guess, and no tree.
function bestRound({ rounds }) {
  const newest = rounds.findLastIndex((one) => one.nodes > 1 && one.drafted[0]);
  return newest >= 0 ? newest : rounds.length - 1;
}

async function conclude(turn) {
  const outcome = turn.article.lastChild;
  if (turn.state === "failed") {
    const again = made("button", "Try again"), edit = made("button", "Edit");
    again.addEventListener("click", () => withdrawn(turn) && ask(turn.question));
    edit.addEventListener("click", () => {
      if (!withdrawn(turn)) return;
      byId("question").value = turn.question;
      byId("question").focus();
    });
    outcome.append(made("span", turn.problem), edit, again);
    outcome.classList.add("failed");
    outcome.setAttribute("role", "alert");
    turn.article.scrollIntoView({ block: "end" });
    refresh();
    return;
  }
  await learnDecisions(turn, true);
  const look = made("button", turn.rounds.length ? summary(turn) : "stopped before the first word");
  look.title = "Show how this answer was made";
  look.disabled = !turn.rounds.length;
  look.addEventListener("click", () => show(turn, bestRound(turn)));
  outcome.replaceChildren(look);
  if (turns.at(-1) === turn) turn.article.scrollIntoView({ block: "end" });
}

// Takes a question that failed out of the conversation, unless another is being answered.
function withdrawn(turn) {
  if (running) return false;
  turns.splice(turns.indexOf(turn), 1);
  turn.article.remove();
  byId("welcome").hidden = turns.length > 0;
  if (shown.turn === turn) show(null, 0);
  return true;
}

function startAnew() {
  running?.abort();
  showRunning(null);
  turns.length = 0;
  byId("turns").replaceChildren();
  byId("welcome").hidden = false;
  show(null, 0);
  byId("question").focus();
}

function showRunning(answer) {
  running = answer;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

// ---- What is seen of the rounds

// Why rounds were as they were, and what plain decoding would have had; asked for once a second at most.
async function learnDecisions(turn, isLast = false) {
  const now = performance.now();
  if (!turn.requestId || (!isLast && now - (turn.askedAt ?? 0) < DECISIONS_MS)) return;
  turn.askedAt = now;
  try {
    turn.decisions = await fetched(`/decisions/${encodeURIComponent(turn.requestId)}`);
    if (shown.turn === turn) showFigures(turn, shown.round, isFollowing);
  } catch { /* the figures go without */ }
}

function show(turn, index, isLive = false) {
  shown = { turn, round: index };
  const round = turn?.rounds[index];
  document.querySelectorAll("#turns .shown").forEach((one) => one.classList.remove("shown"));
  if (round) turn.article.querySelectorAll(`[data-round="${index}"]`).forEach((one) => one.classList.add("shown"));
  byId("place").textContent = round ? `round ${index + 1} of ${turn.rounds.length}` : "example";
  byId("previous").disabled = !(index > 0);
  byId("next").disabled = !round || index + 1 >= turn.rounds.length;
  const drawing = round ?? EXAMPLE, numKept = drawing.drafted.filter(Boolean).length;
  byId("shape").textContent = drawing.parents.length > 1
    ? `${drawing.parents.length - 1} guesses, ${numKept} right: “${readable(drawing.texts.join(""))}”`
    : "No guesses in this round: one pass for one token.";
  drawTree(byId("tree"), drawing, { isLive });
  showFigures(turn, index, isFollowing);
}

function choose(turn, index) {
  if (!turn?.rounds[index]) return;
  isFollowing = turn.state === "running" && index === turn.rounds.length - 1;
  show(turn, index);
}

// ---- Events

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = byId("question").value.trim();
  if (!question || running) return;
  byId("question").value = "";
  ask(question);
});
byId("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("examples").addEventListener("click", (event) => event.target.matches("button") && !running && ask(event.target.textContent));
byId("stop").addEventListener("click", () => { running?.abort(); byId("question").focus(); });
byId("new").addEventListener("click", startAnew);
byId("key").addEventListener("change", refresh);
byId("previous").addEventListener("click", () => choose(shown.turn, shown.round - 1));
byId("next").addEventListener("click", () => choose(shown.turn, shown.round + 1));
byId("rounds").addEventListener("click", (event) => choose(shown.turn, Number(event.target.closest("[data-round]")?.dataset.round)));
byId("turns").addEventListener("click", (event) => {
  const piece = event.target.closest("[data-round]");
  if (piece) choose(turns.find((turn) => turn.article.contains(piece)), Number(piece.dataset.round));
});
byId("why").addEventListener("toggle", () => shown.turn && showDecisions(shown.turn.decisions));
window.addEventListener("resize", () => show(shown.turn, shown.round));

async function watch() {
  if (!document.hidden) await refresh();
  setTimeout(watch, REFRESH_MS);
}
show(null, 0);
watch();
