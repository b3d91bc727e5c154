// The tree of one round. What was kept is a straight line from left to right; other guesses branch off above and below.
import { drawn, made } from "/ui/dom.js";

const FONT_PIXELS = 12, LABEL_PIXELS = 14, SCROLLBAR_PIXELS = 14, LEFT = 28, RIGHT = 64;
const MOST_COLUMN = 104, LEAST_COLUMN = 48, NARROW_COLUMN = 20, MOST_ROW = 30, LEAST_ROW = 4.5, MOST_LABELS = 40;
const pen = made("canvas").getContext("2d");

// Shown in place of a token's text, which may be nothing but spaces.
export const readable = (text) => text.replace(/\n/g, "↵").replace(/\t/g, "⇥").trim() || (text ? "␣" : "end");

export function drawTree(svg, round, { isLive = false } = {}) {
  const nodes = nodesOf(round);
  const rows = placed(nodes);
  const levels = Math.max(1, ...nodes.map((node) => node.depth));
  const lowest = Math.min(...rows), numRows = Math.max(...rows) - lowest;
  const { clientWidth, offsetHeight } = svg.parentElement, tall = offsetHeight - SCROLLBAR_PIXELS;
  const room = clientWidth - LEFT - RIGHT, trunk = Math.max(...nodes.filter(isTrunk).map((node) => node.depth), 0);
  const wide = clamp(room / levels, LEAST_COLUMN, MOST_COLUMN); // levels below what was kept are narrow if need be
  const narrow = clamp((room - trunk * wide) / (levels - trunk || 1), NARROW_COLUMN, wide);
  const row = clamp((tall - 5 * LABEL_PIXELS) / Math.max(1, numRows), LEAST_ROW, MOST_ROW);
  const across = (depth) => LEFT + Math.min(depth, trunk) * wide + Math.max(0, depth - trunk) * narrow;
  const width = across(levels) + RIGHT, height = numRows * row + 5 * LABEL_PIXELS;
  nodes.forEach((node, i) => {
    node.x = across(node.depth);
    node.column = node.depth > trunk ? narrow : wide;
    node.y = (rows[i] - lowest) * row + (rows[i] < 0 ? 2 : 3.5) * LABEL_PIXELS; // room above the line for its words
  });
  svg.setAttribute("width", width);
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("class", isLive ? "live" : "");
  svg.setAttribute("aria-label", described(round, nodes));
  const radius = clamp(row / 3, 1.5, 4);
  svg.replaceChildren(...nodes.slice(1).map((node) => edge(node, nodes[node.parent])),
    ...nodes.map((node) => dot(node, radius)), ...labels(nodes, radius));
  svg.parentElement.scrollTop = nodes[0].y - tall / 2;
}

// The nodes of a round, and behind the last one kept the word that the target added.
function nodesOf({ parents, tokens, probabilities, accepted, drafted, texts }) {
  const kept = accepted.slice(0, drafted.filter(Boolean).length);
  const nodes = parents.map((parent, i) => ({
    parent, text: tokens[i], probability: parent < 0 ? 1 : probabilities[i], kind: parent < 0 ? "root" : "other",
  }));
  for (const node of kept) nodes[node].kind = "kept";
  if (drafted.length > kept.length) {
    nodes.push({ parent: kept.length ? kept[kept.length - 1] : 0, text: texts[texts.length - 1], probability: 1, kind: "bonus" });
  }
  for (const node of nodes) {
    const above = nodes[node.parent];
    node.depth = above ? above.depth + 1 : 0;
    node.likelihood = node.probability * (above ? above.likelihood : 1); // of the path from the root
  }
  return nodes;
}

// The row of each node. Subtrees are moved together until their outlines touch.
function placed(nodes) {
  const children = nodes.map(() => []), offsets = nodes.map(() => 0);
  nodes.forEach((node, i) => node.parent >= 0 && children[node.parent].push(i));

  // Offsets of the children of a node; returns its outline: lowest and highest row at each level, seen from the node.
  function outline(parent) {
    const trunk = children[parent].find((child) => isTrunk(nodes[child]));
    const block = { low: [], high: [] };
    const add = (child, shape, shift) => {
      offsets[child] = shift;
      shape.low.forEach((low, level) => {
        block.low[level] = Math.min(block.low[level] ?? Infinity, low + shift);
        block.high[level] = Math.max(block.high[level] ?? -Infinity, shape.high[level] + shift);
      });
    };
    if (trunk !== undefined) add(trunk, outline(trunk), 0);
    for (const child of children[parent].filter((each) => each !== trunk)) {
      const shape = outline(child);
      const below = Math.max(...shape.low.map((low, level) => (block.high[level] ?? -Infinity) + 1 - low));
      const above = Math.min(...shape.high.map((high, level) => (block.low[level] ?? Infinity) - 1 - high));
      const goesBelow = trunk === undefined || below <= -above;
      add(child, shape, Number.isFinite(below) ? (goesBelow ? below : above) : 0);
    }
    if (trunk === undefined && block.low.length) {
      const middle = (offsets[children[parent][0]] + offsets[children[parent].at(-1)]) / 2;
      for (const child of children[parent]) offsets[child] -= middle;
      for (const side of [block.low, block.high]) side.forEach((value, level) => { side[level] = value - middle; });
    }
    return { low: [0, ...block.low], high: [0, ...block.high] };
  }

  outline(0);
  nodes.forEach((node, i) => { if (node.parent >= 0) offsets[i] += offsets[node.parent]; });
  return offsets;
}

function edge(node, from) {
  const middle = (from.x + node.x) / 2;
  const path = drawn("path", {
    class: `edge ${node.kind}`, d: `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${node.y} ${node.x} ${node.y}`, pathLength: 1,
    opacity: visible(node),
  });
  path.style.animationDelay = delay(node);
  return path;
}

function dot(node, radius) {
  const r = node.kind === "other" ? radius * .8 : Math.max(3, radius + 1);
  const circle = drawn("circle", { class: `dot ${node.kind}`, cx: node.x, cy: node.y, r, opacity: visible(node) });
  const title = drawn("title", {});
  title.textContent = `${readable(node.text)}: ${{ root: "where the round began", bonus: "the large model's own word" }[node.kind]
    ?? `guessed with ${percent(node.probability)}${node.kind === "kept" ? ", and right" : ""}`}`;
  circle.append(title);
  circle.style.animationDelay = delay(node);
  return circle;
}

// Texts of nodes, the most important first, wherever they cover neither dots nor one another.
function labels(nodes, radius) {
  const family = getComputedStyle(document.body).fontFamily;
  const taken = nodes.map(({ x, y }) => [x - radius, y - radius, x + radius, y + radius]);
  const inner = new Set(nodes.map((node) => node.parent));
  const rank = (node) => (node.kind === "other" ? node.likelihood : 2);
  const ranked = nodes.map((node, i) => ({ node, isInner: inner.has(i) })).sort((a, b) => rank(b.node) - rank(a.node));
  return ranked.slice(0, MOST_LABELS).flatMap(({ node, isInner }) => {
    const right = { most: RIGHT - 12, isRight: true }, above = (share) => ({ most: share * node.column - 6 });
    const isLeaf = !isInner && node.kind === "other";
    pen.font = `${isTrunk(node) ? 600 : 400} ${FONT_PIXELS}px ${family}`;
    for (const { most, isRight } of isLeaf ? [right, above(1)] : [above(1.6), above(1), right]) {
      const text = fitted(readable(node.text), most), wide = pen.measureText(text).width;
      if (node.kind === "other" && text.length < 4 && text.endsWith("…")) continue;
      const x = isRight ? node.x + radius + 4 : Math.max(4, node.x - wide / 2);
      const y = isRight ? node.y : node.y - radius - 3 - LABEL_PIXELS / 2;
      const box = [x - 2, y - FONT_PIXELS / 2, x + wide + 2, y + FONT_PIXELS / 2];
      if (taken.some((other) => box[0] < other[2] && other[0] < box[2] && box[1] < other[3] && other[1] < box[3])) continue;
      taken.push(box);
      const label = drawn("text", { class: `label ${node.kind}`, x, y, "dominant-baseline": "central" });
      label.textContent = text;
      label.style.animationDelay = delay(node);
      return [label];
    }
    return [];
  });
}

function fitted(text, most) {
  if (pen.measureText(text).width <= most) return text;
  let end = text.length - 1;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > most) end--;
  return `${text.slice(0, end)}…`;
}

function described(round, nodes) {
  const spoken = nodes.filter(isTrunk).map((node) => readable(node.text));
  return `Tree of ${round.parents.length} nodes. Kept: ${spoken.join(" ")}`;
}

const isTrunk = ({ kind }) => kind === "kept" || kind === "bonus";
const clamp = (value, least, most) => Math.min(most, Math.max(least, value));
const visible = (node) => (node.kind === "other" ? (.2 + .8 * Math.sqrt(node.likelihood)).toFixed(2) : 1);
const delay = (node) => `${node.depth * 45}ms`;
const percent = (share) => `${(100 * share).toFixed(share < .1 ? 1 : 0)} %`;
