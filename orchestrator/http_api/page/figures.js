// What can be read of an answer in numbers: its rounds, its speed, where its time went, and why its trees were so large.
import { byId, made } from "/ui/dom.js";

const PARTS = { // of a round's seconds, in their order in time
  draft: "growing guesses", network: "network", queue: "waiting for a pass", wait: "waiting for weights",
  compute: "computing", other: "orchestrator",
};
const MOST_DECISIONS = 50;

const sum = (values) => values.reduce((total, value) => total + value, 0);
const total = (parts) => sum(Object.values(parts));
const number = (value) => (value >= 100 ? value.toFixed(0) : value.toFixed(value >= 10 ? 1 : 2));
const bytes = (value) => (value >= 1e9 ? `${number(value / 1e9)} GB` : `${(value / 1e6).toFixed(0)} MB`);
const seconds = (value) => (value < .9995 ? `${(1000 * value).toFixed(value < .01 ? 1 : 0)} ms` : `${number(value)} s`);

// Tokens per second, and as predicted for plain decoding, over rounds after the first, which read the prompt.
export function speedOf({ rounds, decisions }) {
  const later = rounds.slice(1), compared = decisions.slice(1).filter((one) => one.plain_rate > 0);
  const rate = sum(later.map((one) => one.texts.length)) / sum(later.map((one) => one.seconds.total));
  const plain = sum(compared.map((one) => one.tokens)) / sum(compared.map((one) => one.tokens / one.plain_rate));
  return { rate: rate || 0, plain: plain || 0, numTokens: sum(rounds.map((one) => one.texts.length)) };
}

export function summary(turn) {
  const { rate, plain, numTokens } = speedOf(turn);
  const parts = [`${numTokens} tokens`];
  if (rate) parts.push(`${number(rate)} tokens/s`);
  if (rate && plain && rate > plain) parts.push(`${number(rate / plain)} times plain decoding`);
  if (turn.finish === "length") parts.push("ended at the limit of tokens");
  if (turn.state === "stopped") parts.push("stopped");
  return parts.join(" · ");
}

export function showFigures(turn, selected, isLive) {
  const has = turn !== null && turn.rounds.length > 0;
  for (const id of ["rounds-panel", "speed-panel", "why"]) byId(id).hidden = !has;
  if (!has) return;
  showRounds(turn.rounds, selected, isLive);
  showSpeed(turn);
  showParts(turn.rounds);
  if (byId("why").open) showDecisions(turn.decisions);
}

// One bar a round: the words that it added, those guessed at the bottom.
function showRounds(rounds, selected, isLive) {
  const most = Math.max(...rounds.map((one) => one.texts.length));
  byId("rounds").replaceChildren(...rounds.map((one, i) => {
    const bar = made("span", undefined, "bar"), numGuessed = one.drafted.filter(Boolean).length;
    bar.dataset.round = i;
    bar.title = `Round ${i + 1}: ${one.nodes} nodes, ${one.texts.length} tokens, ${seconds(one.seconds.total)}`;
    bar.classList.toggle("selected", i === selected);
    for (const [kind, count] of [["bonus", one.texts.length - numGuessed], ["kept", numGuessed]]) {
      bar.appendChild(made("i", undefined, kind)).style.height = `${100 * count / most}%`;
    }
    return bar;
  }));
  if (isLive) byId("rounds").scrollLeft = byId("rounds").scrollWidth;
}

function showSpeed(turn) {
  const { rate, plain, numTokens } = speedOf(turn), { rounds } = turn;
  const most = Math.max(rate, plain);
  const isGuessing = rounds.some((one) => one.nodes > 1);
  const compared = [[isGuessing ? "with guesses" : "without guesses", rate, "kept", ""], ["plain decoding", plain, "other", "predicted"]];
  byId("speed").replaceChildren(...compared.filter(([, value]) => value).map(([name, value, kind, note]) => {
    const pair = named(name, `${number(value)} tokens/s`);
    pair.insertBefore(made("span", undefined, `meter ${kind}`), pair.lastChild).style.width = `${100 * value / most}%`;
    if (note) pair.lastChild.append(made("small", ` ${note}`));
    return pair;
  }));
  byId("figures").replaceChildren(
    named("times as fast", rate && plain ? number(rate / plain) : "–"),
    named("tokens a round", number(numTokens / rounds.length)),
    named("a round takes", seconds(sum(rounds.map((one) => one.seconds.total)) / rounds.length)),
    named("rounds", String(rounds.length)),
  );
}

function showParts(rounds) {
  const all = sum(rounds.map((one) => one.seconds.total));
  const spent = Object.keys(PARTS).map((name) => [name, sum(rounds.map((one) => one.seconds[name]))]);
  byId("split").replaceChildren(...spent.map(([name, value]) => {
    const part = made("span", undefined, name);
    part.style.width = `${100 * value / all}%`;
    return part;
  }));
  byId("parts").replaceChildren(...spent.map(([name, value]) => {
    const pair = named(PARTS[name], seconds(value));
    pair.prepend(made("i", undefined, name));
    pair.append(made("span", `${Math.round(100 * value / all)} %`, "share"));
    return pair;
  }));
}

function named(name, value, className) {
  const pair = made("div", undefined, className);
  pair.append(made("dt", name), made("dd", value));
  return pair;
}

export function showDecisions(decisions) {
  fill(byId("decisions"), ["round", "why", "grown", "sent", "tokens expected", "came", "seconds expected", "came", "tokens/s drafting", "plain"],
    decisions.slice(-MOST_DECISIONS).map((one) => [one.number, one.mode, one.num_grown, one.num_sent, number(one.expected_tokens), one.tokens,
      number(total(one.expected)), number(total(one.seconds)), number(one.draft_rate), number(one.plain_rate)]));
}

// The workers as the orchestrator sees them; of an orchestrator that does not answer nothing is known.
export function showWorkers(workers, isKnown) {
  fill(byId("workers"), ["worker", "state", "model", "sessions", "KV used", "passes", "address"],
    workers.map(({ address, info, problem }) => [info.kind, isKnown ? problem || "ready" : "unknown", info.model_name,
      info.num_sessions, `${bytes(info.kv_used_bytes)} of ${bytes(info.kv_bytes)}`, info.num_passes, address]));
  const stages = workers.flatMap(({ info }) => info.stages.length ? [...info.stages.map((one, i) => [`stage ${i + 1}`,
    `${one.first_layer} to ${one.end_layer - 1}`, bytes(one.memory_bytes),
    `${seconds(one.queue_ns / 1e9)} waiting for the one before, ${seconds(one.wait_ns / 1e9)} for weights, ${seconds(one.compute_ns / 1e9)} computing`,
    one.address]),
  ["network", "", "", seconds(info.stage_network_ns / 1e9), ""]] : []);
  fill(byId("stages"), stages.length ? ["", "layers", "memory", "last pass", "address"] : [], stages);
  for (const id of ["workers", "stages"]) byId(id).classList.toggle("stale", !isKnown);
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
