"use strict";
// Three parts: the run (what happened, replayed from its records), the pictures, and the controls.
// Whatever a run brings along reaches the page as text only: textContent, fillText, never markup.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const numSteps = data.start.length;
const kinds = Object.keys(data.charts).filter((name) => !["running", "waiting", "used", "free"].includes(name));
const names = (ids) => (ids.length > 8 ? `${ids.slice(0, 8).join(", ")} and ${ids.length - 8} more` : ids.join(", "));
const who = (ids) => `request${ids.length > 1 ? "s" : ""} ${names(ids)}`;
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// ---------------------------------------------------------------- the run

// The pool at one moment: `tables` are the blocks of each resident request, `filled` marks the blocks whose content
// can be found by its digest. A block in no table is cached if it is filled, else blank. "Position k" is the moment
// when step k has been planned (k counts from 0); position numSteps is the end of the run.
class Pool {
  constructor(tables, filled, references) {
    this.tables = tables || new Map();
    this.filled = filled || new Uint8Array(data.num_blocks);
    this.references = references || new Int32Array(data.num_blocks);
  }
  copy() {
    const tables = new Map();
    for (const [id, blocks] of this.tables) tables.set(id, blocks.slice());
    return new Pool(tables, this.filled.slice(), this.references.slice());
  }
  // Apply a record; returns the blocks that were hit and those that were evicted.
  apply(what) {
    const hits = [], evicted = [];
    for (const [verb, blocks] of what.blocks || []) {
      for (const block of blocks) {
        if (verb === "reference") { this.references[block]++; hits.push(block); }
        else if (verb === "release") this.references[block]--;
        else if (verb === "register") this.filled[block] = 1;
        else if (verb === "forget") this.filled[block] = 0;
        else if (verb === "take") {
          if (this.filled[block]) evicted.push(block);
          this.filled[block] = 0;
          this.references[block] = 1;
        }
      }
    }
    for (const id of what.preempted || []) this.tables.delete(id);
    for (const [id, reason] of what.ended || []) if (reason) this.tables.delete(id);
    for (const [id, blocks] of what.tables || []) this.tables.set(id, (this.tables.get(id) || []).concat(blocks));
    return { hits, evicted };
  }
  count() {
    const count = { owned: 0, shared: 0, cached: 0, blank: 0 };
    for (let b = 0; b < data.num_blocks; b++) count[this.stateOf(b)]++;
    return count;
  }
  stateOf(block) {
    const n = this.references[block];
    return n > 1 ? "shared" : n === 1 ? "owned" : this.filled[block] ? "cached" : "blank";
  }
}

const requests = new Map();
const steps = Array.from({ length: numSteps + 1 }, () => ({ hits: [], evicted: [], preempted: [], ended: [], held: null }));
const writers = new Map();  // the request that computed the content of each block
const history = { owned: [], shared: [], cached: [] };
const totals = { prompt: 0, cached: 0, generated: 0, preemptions: 0, evictions: 0, hits: 0 };
const firstRecord = [];  // of each position: the number of records that come before it
const saved = new Map();  // pools by position, so that any position is a few records away from one of them
const SAVE_EVERY = 64;
let lastBlock = 0;

function mark(request, kind, step) {
  const life = request.life, last = life[life.length - 1];
  if (last && last.kind === kind && last.to === step - 1) last.to = step;
  else life.push({ kind, from: step, to: step });
}

// A stay in the queue lasts until the request moves in or the run ends.
function enqueue(request, kind, step) { request.life.push({ kind, from: step, to: Infinity }); }

function replayPlan(k, what) {
  for (const [id, numPrompt] of what.arrived || []) {
    const request = { id, numPrompt, cached: null, tokens: [], at: [], life: [], notes: [], end: null, reason: null };
    requests.set(id, request);
    enqueue(request, "waiting", k);
    request.notes.push([k, `arrives with a prompt of ${plural(numPrompt, "token")}`]);
  }
  (what.preempted || []).forEach((id, i) => {
    const request = requests.get(id), lacking = (what.lacking || [])[i];
    const why = "it was admitted last" + (lacking > 0 ? `, and ${wereLacking(lacking)}` : "");
    totals.preemptions++;
    steps[k].preempted.push([id, why]);
    enqueue(request, "preempted", k);
    request.notes.push([k, `is preempted: ${why}. It gives its blocks back, and will be computed anew`]);
  });
  if (what.held) steps[k].held = what.held;
  const found = findDonors(what), reasons = new Map(what.reasons || []);
  for (const [id, cached] of what.moved_in || []) {
    const request = requests.get(id), queue = request.life[request.life.length - 1];
    queue.to = k - 1;
    if (queue.to < queue.from) request.life.pop();
    if (request.cached === null) {
      request.cached = cached;
      totals.prompt += request.numPrompt;
      totals.cached += cached;
    }
    const { blocks, donors } = found.get(id) || { blocks: [], donors: [] };
    if (cached) { steps[k].hits.push({ id, cached, blocks, donors }); totals.hits++; }
    const by = donors.length ? `, computed by ${who(donors)}` : "";
    request.notes.push([k, `moves in; ${cached ? plural(cached, "token") + " found in the prefix cache" + by : "nothing of it is cached"}${reasons.has(id) ? "; " + reasons.get(id) : ""}`]);
    for (const donor of donors) requests.get(donor).notes.push([k, `request ${id} takes over blocks that this one computed`]);
  }
  for (const [id, start, count] of what.prefill || []) {
    const request = requests.get(id);
    mark(request, "prefill", k);
    request.notes.push([k, `prefill: tokens ${start} to ${start + count - 1}`]);
  }
  for (const id of what.decode || []) mark(requests.get(id), "decode", k);
  for (const [id, count] of what.drafts || []) requests.get(id).drafts = [k, count];
}

const wereLacking = (n) => `${plural(n, "block")} ${n === 1 ? "was" : "were"} lacking`;

// Which blocks each admitted request found, and who computed them: { blocks, donors } by the request's number.
function findDonors(what) {
  const cached = new Map(what.moved_in || []), found = new Map(), tables = what.tables || [];
  const numHits = (id) => Math.floor((cached.get(id) || 0) / data.block_size);
  for (const [id, blocks] of tables) for (const block of blocks.slice(numHits(id))) writers.set(block, id);
  for (const [id, all] of tables) {
    const blocks = all.slice(0, numHits(id));
    if (!blocks.length) continue;
    const donors = new Set(blocks.map((block) => writers.get(block)).filter((donor) => donor !== undefined && donor !== id));
    found.set(id, { blocks, donors: [...donors] });
  }
  return found;
}

function replayTokens(position, what) {
  for (const [id, ...tokens] of what.tokens || []) {
    const request = requests.get(id), known = request.tokens.length;
    if (request.drafts) {
      const [step, count] = request.drafts;
      request.drafts = null;
      request.notes.push([step, `verifies ${plural(count, "draft")}: ${Math.min(tokens.length - 1, count)} right`]);
    }
    for (const token of tokens) { request.tokens.push(token); request.at.push(position); }
    totals.generated += request.tokens.length - Math.max(known, request.numPrompt);
  }
}

function end(position, endings) {
  for (const [id, reason] of endings) {
    const request = requests.get(id), last = request.life[request.life.length - 1];
    request.end = position;
    request.reason = reason;
    if (last && last.to === Infinity) last.to = Math.max(position - 1, last.from);
    request.notes.push([position, reason ? `ends: ${reason}` : "has not ended"]);
    if (reason) steps[position].ended.push(id);
  }
}

function replay() {
  const pool = new Pool();
  let position = -1;
  data.records.forEach(([kind, step, what], number) => {
    if (kind === "plan") position = step;
    const next = kind === "plan" ? position : position + 1;
    if (kind === "plan") replayPlan(step, what);
    replayTokens(next, what);
    end(next, what.ended || []);
    const { evicted } = pool.apply(what);
    totals.evictions += evicted.length;
    steps[next].evicted.push(...evicted);
    for (const [, blocks] of what.tables || []) for (const block of blocks) lastBlock = Math.max(lastBlock, block);
    if (kind === "plan") {
      firstRecord[step] = number + 1;
      const count = pool.count();
      for (const name of Object.keys(history)) history[name].push(count[name]);
      if (step % SAVE_EVERY === 0) saved.set(step, pool.copy());
    }
  });
  firstRecord[numSteps] = data.records.length;
  for (const request of requests.values()) if (request.end === null) end(numSteps, [[request.id, null]]);
  return pool.count();
}

let nearby = { position: Infinity, pool: null };  // the pool that was asked for last: playing goes on from it
function poolAt(position) {
  if (nearby.position > position || nearby.position < position - SAVE_EVERY) {
    const at = Math.min(position, numSteps - 1);
    const start = at - (at % SAVE_EVERY);
    nearby = { position: start, pool: saved.get(start).copy() };
  }
  for (let r = firstRecord[nearby.position]; r < firstRecord[position]; r++) nearby.pool.apply(data.records[r][2]);
  nearby.position = position;
  return nearby.pool;
}

const atEnd = replay();
const order = [...requests.keys()].sort((a, b) => a - b);
const isEvent = {
  hit: (s) => s.hits.length > 0,
  eviction: (s) => s.evicted.length > 0,
  preemption: (s) => s.preempted.length > 0,
};
isEvent.any = (s) => isEvent.hit(s) || isEvent.eviction(s) || isEvent.preemption(s);

// ---------------------------------------------------------------- the pictures

const LEFT = 92, RIGHT = 12, GAP = 16;
const OWNERS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b5a800", "#7570b3", "#8c6d46", "#5fb3a2"];
let color = {};
let view = { from: 0, to: numSteps };  // the steps that the timeline shows
let cursor = 0, chosen = null;
let lanes = [];

function readColors() {
  const style = getComputedStyle(document.documentElement);
  for (const name of ["page", "panel", "text", "faint", "line", "grid", "decode", "prefill", "other", "waiting",
    "preempted", "used", "shared", "cached", "cursor"]) color[name] = style.getPropertyValue(`--${name}`).trim();
}

// A canvas of `height` CSS pixels that is sharp on any screen.
function prepare(canvas, height) {
  const width = canvas.clientWidth || canvas.width, ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.font = "12px system-ui, 'Liberation Sans', sans-serif";
  return { g, width, height };
}

const xOf = (step, width) => LEFT + ((step - view.from) / (view.to - view.from)) * (width - LEFT - RIGHT);

// The steps of each column of pixels: one for one where there is room, else several share a column.
function columnsOf(width) {
  const columns = [], room = width - LEFT - RIGHT, perColumn = Math.max(1, (view.to - view.from) / room);
  for (let at = view.from; at < view.to; at += perColumn) {
    const first = Math.floor(at), last = Math.min(Math.max(first, Math.ceil(at + perColumn) - 1), numSteps - 1);
    const x = xOf(at, width);
    columns.push({ first, last, x, w: Math.max(xOf(Math.min(at + perColumn, view.to), width) - x, 1) });
  }
  return columns;
}

function highest(values, { first, last }) {
  let most = values[first] || 0;
  for (let k = first + 1; k <= last; k++) if (values[k] > most) most = values[k];
  return most;
}

function niceTop(value) {
  const unit = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 2.5, 5, 10].map((f) => f * unit).find((top) => top >= value);
}

function frameLane(g, width, lane, top, unit) {
  g.fillStyle = color.text;
  g.textAlign = "left";
  g.textBaseline = "top";
  g.fillText(lane.title, 0, lane.y + 13);
  g.strokeStyle = color.grid;
  g.strokeRect(LEFT - 0.5, lane.y + 0.5, width - LEFT - RIGHT + 1, lane.h);
  if (top === undefined) return;
  g.fillStyle = color.faint;
  g.textAlign = "right";
  g.fillText(`${top.toLocaleString("en")}${unit || ""}`, LEFT - 4, lane.y);
  g.textBaseline = "bottom";
  g.fillText("0", LEFT - 4, lane.y + lane.h + 1);
}

// Names of a lane's colours, above its upper right corner.
function key(g, width, lane, entries) {
  g.textBaseline = "alphabetic";
  g.textAlign = "right";
  let x = width - RIGHT;
  for (const [name, draw] of entries.slice().reverse()) {
    g.fillStyle = color.faint;
    g.fillText(name, x, lane.y - 4);
    x -= g.measureText(name).width + 6;
    draw(g, x - 10, lane.y - 13, 10);
    x -= 24;
  }
}
const swatch = (name) => (g, x, y, size) => { g.fillStyle = color[name]; g.fillRect(x, y, size, size); };
const stroke = (name, dash) => (g, x, y, size) => {
  g.strokeStyle = color[name]; g.lineWidth = 2; g.setLineDash(dash);
  g.beginPath(); g.moveTo(x - 6, y + size / 2); g.lineTo(x + size, y + size / 2); g.stroke();
  g.setLineDash([]); g.lineWidth = 1;
};

const kindColor = (name) => ({ decode: "decode", prefill: "prefill" })[name] || "other";

function drawTokens(g, width, lane, columns) {
  const sums = data.start.map((_, k) => kinds.reduce((sum, name) => sum + data.charts[name][k], 0));
  const most = sums.reduce((a, b) => Math.max(a, b), 1);
  const top = most > data.budget / 3 ? data.budget : niceTop(most);
  frameLane(g, width, lane, top);
  for (const column of columns) {
    let k = column.first;
    for (let i = k; i <= column.last; i++) if (sums[i] > sums[k]) k = i;
    let y = lane.y + lane.h;
    for (const name of kinds) {
      const h = (data.charts[name][k] / top) * lane.h;
      g.fillStyle = color[kindColor(name)];
      g.fillRect(column.x, y - h, Math.max(column.w - (column.w > 4 ? 1 : 0), 1), h);
      y -= h;
    }
  }
  if (top === data.budget) {
    g.strokeStyle = color.preempted; g.setLineDash([5, 3]);
    g.beginPath(); g.moveTo(LEFT, lane.y + 1); g.lineTo(width - RIGHT, lane.y + 1); g.stroke(); g.setLineDash([]);
  }
  const budget = top === data.budget ? "the budget" : `budget ${data.budget.toLocaleString("en")}, far above`;
  key(g, width, lane, [...kinds.map((name) => [name, swatch(kindColor(name))]), [budget, stroke("preempted", [5, 3])]]);
}

function drawLine(g, lane, columns, values, top, name, dash) {
  g.strokeStyle = color[name]; g.lineWidth = 2; g.setLineDash(dash);
  g.beginPath();
  columns.forEach((column, i) => {
    const y = lane.y + lane.h - (highest(values, column) / top) * (lane.h - 2) - 1;
    if (i) g.lineTo(column.x, y); else g.moveTo(column.x, y);
    g.lineTo(column.x + column.w, y);
  });
  g.stroke();
  g.setLineDash([]); g.lineWidth = 1;
}

function drawQueues(g, width, lane, columns) {
  const { running, waiting } = data.charts;
  const top = niceTop(running.concat(waiting).reduce((a, b) => Math.max(a, b), 1));
  frameLane(g, width, lane, top);
  drawLine(g, lane, columns, running, top, "decode", []);
  drawLine(g, lane, columns, waiting, top, "waiting", [4, 3]);
  key(g, width, lane, [["running", stroke("decode", [])], ["waiting", stroke("waiting", [4, 3])]]);
}

function drawTimes(g, width, lane, columns) {
  const all = data.device_time.concat(data.host).filter((ms) => ms > 0).sort((a, b) => a - b);
  const low = 10 ** Math.floor(Math.log10(all[0] || 0.1)), high = 10 ** Math.ceil(Math.log10((all[all.length - 1] || 1) * 1.01));
  frameLane(g, width, lane);
  g.fillStyle = color.faint; g.textAlign = "right";
  g.textBaseline = "top"; g.fillText(`${high} ms`, LEFT - 4, lane.y);
  g.textBaseline = "bottom"; g.fillText(`${low} ms`, LEFT - 4, lane.y + lane.h + 1);
  const yOf = (ms) => lane.y + lane.h - 2 - (Math.log(ms / low) / Math.log(high / low)) * (lane.h - 4);
  for (const column of columns) {
    const x = column.x + column.w / 2, device = highest(data.device_time, column), host = highest(data.host, column);
    g.fillStyle = color.decode;
    if (device > 0) g.fillRect(x - 1.5, yOf(device) - 1.5, 3, 3);
    g.strokeStyle = color.preempted;
    if (host > 0) { const y = yOf(host); g.beginPath(); g.moveTo(x - 2, y - 2); g.lineTo(x + 2, y + 2); g.moveTo(x - 2, y + 2); g.lineTo(x + 2, y - 2); g.stroke(); }
  }
  const host = width < 400 ? "host" : "host (schedule, prepare, launch, update)"; // a telephone has no room for all
  key(g, width, lane, [["device", swatch("decode")], [host, shapes.eviction]]);
}

function drawMemory(g, width, lane, columns) {
  frameLane(g, width, lane, data.num_blocks);
  for (const column of columns) {
    let y = lane.y + lane.h;
    for (const [name, paint] of [["shared", "shared"], ["owned", "used"], ["cached", "cached"]]) {
      const h = (highest(history[name], { first: column.last, last: column.last }) / data.num_blocks) * lane.h;
      g.fillStyle = color[paint];
      g.fillRect(column.x, y - h, column.w + 0.5, h);
      y -= h;
    }
  }
  key(g, width, lane, [["shared", swatch("shared")], ["one owner", swatch("used")], ["cached, nobody's", swatch("cached")]]);
}

const shapes = {
  hit(g, x, y, s) { g.fillStyle = color.other; g.beginPath(); g.moveTo(x + s / 2, y); g.lineTo(x + s, y + s); g.lineTo(x, y + s); g.fill(); },
  eviction(g, x, y, s) { g.strokeStyle = color.preempted; g.lineWidth = 2; g.beginPath(); g.moveTo(x, y); g.lineTo(x + s, y + s); g.moveTo(x + s, y); g.lineTo(x, y + s); g.stroke(); g.lineWidth = 1; },
  preemption(g, x, y, s) { g.fillStyle = color.preempted; g.beginPath(); g.moveTo(x + s / 2, y); g.lineTo(x + s, y + s / 2); g.lineTo(x + s / 2, y + s); g.lineTo(x, y + s / 2); g.fill(); },
};

function drawEvents(g, width, lane, columns) {
  frameLane(g, width, lane);
  const rows = ["hit", "eviction", "preemption"];
  let until = rows.map(() => -Infinity);
  for (const column of columns) {
    rows.forEach((name, row) => {
      for (let k = column.first; k <= column.last; k++) {
        const x = column.x + column.w / 2 - 4;
        if (isEvent[name](steps[k]) && x > until[row]) { shapes[name](g, x, lane.y + 3 + row * 12, 8); until[row] = x + 3; break; }
      }
    });
  }
  key(g, width, lane, [["prefix hit", shapes.hit], ["eviction", shapes.eviction], ["preemption", shapes.preemption]]);
}

// Height and colour both tell what a request does: a thin line waits, a full bar is prefill, a half one decodes.
const LIFE = {
  waiting: ["waiting", 0.2], preempted: ["preempted", 0.2], prefill: ["prefill", 1], decode: ["decode", 0.55],
};

// The requests that the last lane shows, one a row: those that live in the visible steps. If these are many, those that
// only wait there are left out. The chosen one is always among them.
const MANY = 60;
let rows = [];
function findRows() {
  const lives = (id, waits) => id === chosen || requests.get(id).life
    .some(({ kind, from, to }) => from < view.to && to >= view.from && (waits || kind !== "waiting"));
  const alive = order.filter((id) => lives(id, true));
  return alive.length <= MANY ? alive : alive.filter((id) => lives(id, false));
}

function drawRequests(g, width, lane) {
  frameLane(g, width, lane);
  rows = findRows();
  const pitch = lane.h / Math.max(rows.length, 1);
  let thickness = Math.max(Math.min(pitch * 0.85, 12), 1);
  g.save();
  g.beginPath(); g.rect(LEFT, lane.y, width - LEFT - RIGHT, lane.h); g.clip();
  const drawLife = (id, row) => {
    const middle = lane.y + (row + 0.5) * pitch;
    for (const { kind, from, to } of requests.get(id).life) {
      if (from >= view.to || to < view.from) continue;
      const x = xOf(from, width), [name, share] = LIFE[kind], h = Math.max(thickness * share, 1);
      g.fillStyle = color[name];
      g.fillRect(x, middle - h / 2, Math.max(xOf(Math.min(to, numSteps - 1) + 1, width) - x, 1), h);
      if (kind === "preempted" && pitch >= 2.5) shapes.preemption(g, x - 3, middle - 3.5, 7);
    }
  };
  rows.forEach(drawLife);
  if (chosen !== null) {
    const row = rows.indexOf(chosen), middle = lane.y + (row + 0.5) * pitch;
    g.fillStyle = color.page; g.fillRect(LEFT, middle - 7, width, 14);
    g.strokeStyle = color.text; g.strokeRect(LEFT - 2, middle - 7, width, 14);
    thickness = 10;
    drawLife(chosen, row);
    drawGifts(g, width, (id) => lane.y + (rows.indexOf(id) + 0.5) * pitch);
  }
  g.restore();
  key(g, width, lane, [["waits", (g, x, y, s) => { g.fillStyle = color.waiting; g.fillRect(x, y + s / 2 - 1, s, 2); }],
    ["prefill", swatch("prefill")], ["decodes", (g, x, y, s) => { g.fillStyle = color.decode; g.fillRect(x, y + s * 0.2, s, s * 0.55); }],
    ["preempted", (g, x, y, s) => { g.fillStyle = color.preempted; g.fillRect(x, y + s / 2 - 1, s, 2); shapes.preemption(g, x - 3, y + 1.5, 7); }]]);
}

// An arrow for each prefix hit of the chosen request: from the request that computed the blocks to the one that found them.
function drawGifts(g, width, middleOf) {
  g.strokeStyle = g.fillStyle = color.other;
  g.lineWidth = 2;
  for (let k = view.from; k < Math.min(view.to, numSteps); k++) for (const { id, donors } of steps[k].hits) for (const donor of donors) {
    if (id !== chosen && donor !== chosen) continue;
    const x = xOf(k + 0.5, width), from = middleOf(donor), to = middleOf(id), back = to > from ? -7 : 7;
    g.beginPath(); g.moveTo(x, from); g.lineTo(x, to); g.stroke();
    g.beginPath(); g.moveTo(x, to); g.lineTo(x - 4, to + back); g.lineTo(x + 4, to + back); g.fill();
  }
  g.lineWidth = 1;
}

function drawTimeline() {
  const heights = { tokens: 72, queues: 42, times: 46, memory: 46, events: 39, requests: Math.min(Math.max(order.length * 9, 50), 130) };
  const titles = { tokens: "tokens", queues: "requests", times: "time a step", memory: "KV blocks", events: "events", requests: "each request" };
  let y = GAP;
  lanes = Object.entries(heights).map(([name, h]) => {
    const lane = { name, title: titles[name], y, h };
    y += h + GAP + 3;
    return lane;
  });
  const { g, width } = prepare($("lanes"), y + 14);
  g.clearRect(0, 0, width, y + 14);
  const columns = columnsOf(width), draw = { tokens: drawTokens, queues: drawQueues, times: drawTimes, memory: drawMemory, events: drawEvents, requests: drawRequests };
  for (const lane of lanes) draw[lane.name](g, width, lane, columns);
  g.fillStyle = color.faint; g.textAlign = "center"; g.textBaseline = "top";
  const shown = view.to - view.from, unit = niceTop(shown / 10);
  for (let k = Math.ceil(view.from / unit) * unit; k < view.to; k += Math.max(Math.round(unit), 1)) {
    if (k >= 1) g.fillText(k.toLocaleString("en"), xOf(k - 0.5, width), y - 4);
  }
  g.textAlign = "left";
  g.fillText("step", 0, y - 4);
  prepare($("cursor"), y + 14);
}

function drawCursor() {
  const canvas = $("cursor"), g = canvas.getContext("2d"), width = canvas.clientWidth, height = canvas.clientHeight;
  g.clearRect(0, 0, width, height);
  const x = xOf(cursor, width), w = Math.max(xOf(cursor + 1, width) - x, 2);
  g.globalAlpha = 0.16; g.fillStyle = color.cursor; g.fillRect(x, 0, w, height - 14);
  g.globalAlpha = 1; g.fillRect(x + w / 2 - 0.75, 0, 1.5, height - 14);
}

const ownerColor = (id) => OWNERS[id % OWNERS.length];
function inkOn(hex) {
  const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  return 0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#000000" : "#ffffff";
}

// One block. Its state shows without colour: blank is an empty frame, cached a frame with a dot, owned a full square
// with its owner's number, shared a full square with a double frame and the number of its owners.
// While a request is chosen, blocks of others are faded: grey, so that the colours left are the chosen one's.
function drawBlock(g, x, y, size, state, owner, count, faded = false) {
  const s = size - (size > 6 ? 2 : 1);
  g.lineWidth = 1;
  if (state === "blank" || state === "cached") {
    g.strokeStyle = state === "cached" ? color.faint : color.grid;
    if (size > 4) g.strokeRect(x + 0.5, y + 0.5, s - 1, s - 1);
    else { g.fillStyle = color.grid; g.fillRect(x, y, s, s); }
    if (state === "cached") { g.fillStyle = color.faint; const d = Math.max(s * 0.34, 1); g.fillRect(x + (s - d) / 2, y + (s - d) / 2, d, d); }
    return;
  }
  g.fillStyle = faded ? color.grid : ownerColor(owner);
  g.fillRect(x, y, s, s);
  if (state === "shared" && size > 5 && !faded) {
    g.lineWidth = size > 14 ? 2 : 1;
    g.strokeStyle = color.text; g.strokeRect(x + 1, y + 1, s - 2, s - 2);
    g.strokeStyle = color.page; g.strokeRect(x + 3, y + 3, s - 6, s - 6);
    g.lineWidth = 1;
  }
  const label = state === "shared" ? `×${count}` : `${owner}`;
  if (size >= 17 && label.length * 6.2 < s) {
    g.fillStyle = faded ? color.faint : inkOn(ownerColor(owner));
    g.textAlign = "center"; g.textBaseline = "middle";
    g.fillText(label, x + s / 2, y + s / 2 + 0.5);
  }
}

let grid = null;
function layoutGrid() {
  const shown = Math.min(data.num_blocks, Math.max(lastBlock + 1, 64)), width = $("blocks").clientWidth;
  let size = 44;
  while (size > 3 && Math.ceil(shown / Math.floor(width / size)) * size > 300) size--;
  const across = Math.max(Math.floor(width / size), 1);
  grid = { shown, size, across, g: prepare($("blocks"), Math.ceil(shown / across) * size + 2).g, owner: new Int32Array(data.num_blocks) };
  const rest = data.num_blocks - shown;
  $("pool-size").textContent = `${data.num_blocks.toLocaleString("en")} blocks of ${data.block_size} tokens` +
    (rest ? `; the last ${rest.toLocaleString("en")} were never used and are left out.` : ".");
}

function drawBlocks(pool) {
  const { g, size, across, shown, owner } = grid, now = steps[cursor];
  g.clearRect(0, 0, $("blocks").clientWidth, $("blocks").clientHeight);
  for (const [id, blocks] of pool.tables) for (const block of blocks) owner[block] = id;
  const own = new Set(chosen === null ? [] : pool.tables.get(chosen) || []);
  const small = size < 10;
  for (let b = 0; b < shown; b++) {
    const x = (b % across) * size, y = Math.floor(b / across) * size, state = pool.stateOf(b);
    const faded = chosen !== null && !own.has(b);
    drawBlock(g, x, y, size, state, own.has(b) ? chosen : owner[b], pool.references[b], faded);
    if (own.has(b)) { g.strokeStyle = color.text; g.lineWidth = 2; g.strokeRect(x, y, size - (small ? 1 : 2), size - (small ? 1 : 2)); }
  }
  for (const { blocks } of now.hits) for (const block of blocks) if (block < shown) {
    shapes.hit(g, (block % across) * size + 2, Math.floor(block / across) * size + 2, Math.max(size * 0.3, 3));
  }
  for (const block of now.evicted) if (block < shown) {
    shapes.eviction(g, (block % across) * size + size * 0.62, Math.floor(block / across) * size + 1, Math.max(size * 0.26, 3));
  }
}

function drawLegend() {
  const entries = [["owned", "one owner (its number)", 7, 1], ["shared", "shared by requests with the same prefix", 4, 3],
    ["cached", "cached: nobody's, findable, evictable", 0, 0], ["blank", "blank", 0, 0], ["hit", "found in this step", 0, 0], ["evicted", "evicted in this step", 0, 0]];
  $("block-legend").replaceChildren(...entries.map(([state, text, owner, count]) => {
    const item = document.createElement("li"), canvas = document.createElement("canvas");
    canvas.width = canvas.height = 36;
    const g = canvas.getContext("2d");
    g.scale(2, 2);
    g.font = "11px sans-serif";
    if (state === "evicted") shapes.eviction(g, 4, 4, 9);
    else if (state === "hit") shapes.hit(g, 4, 4, 9);
    else drawBlock(g, 0, 0, 18, state, owner, count);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `sign of a block: ${state}`);
    item.append(canvas, text);
    return item;
  }));
}

// ---------------------------------------------------------------- the words

function definitions(list, pairs) {
  list.replaceChildren(...pairs.map(([term, value, id]) => {
    const box = document.createElement("div"), dt = document.createElement("dt"), dd = document.createElement("dd");
    dt.textContent = term;
    dd.textContent = typeof value === "number" ? value.toLocaleString("en") : value;
    if (id) dd.id = id;
    box.append(dt, dd);
    return box;
  }));
}

const milliseconds = (ms) => (ms === null || ms === undefined ? "–" : `${ms >= 100 ? ms.toFixed(0) : ms.toPrecision(3)} ms`);

function describeStep(pool) {
  const count = pool.count(), now = steps[cursor], ended = cursor === numSteps;
  $("step-title").textContent = ended ? `The end, after ${plural(numSteps, "step")}`
    : `Step ${(cursor + 1).toLocaleString("en")} of ${numSteps.toLocaleString("en")}, ${((data.start[cursor] - data.start[0]) / 1e3).toFixed(3)} s after the first`;
  const value = (series) => (ended ? "–" : series[cursor]);
  definitions($("step"), [
    ...kinds.map((name) => [`${name} tokens`, value(data.charts[name]), `step-${name}`]),
    ["of a budget of", data.budget],
    ["running", value(data.charts.running), "step-running"], ["waiting", value(data.charts.waiting), "step-waiting"],
    ["host", milliseconds(data.host[cursor])], ["device", milliseconds(data.device_time[cursor])],
    ["blocks: one owner", count.owned, "step-owned"], ["shared", count.shared, "step-shared"],
    ["cached", count.cached, "step-cached"], ["blank", count.blank, "step-blank"],
  ]);
  const place = $("step-title").textContent.split(",")[0];
  $("lanes").setAttribute("aria-label", `timeline of ${plural(numSteps, "step")}; ${place}`);
  $("blocks").setAttribute("aria-label", `${plural(data.num_blocks, "block")} of the KV cache: ${count.owned} with one owner, ` +
    `${count.shared} shared, ${count.cached} cached, ${count.blank} blank`);
  const lines = [
    ...now.preempted.map(([id, why]) => [`◆ request ${id} is preempted: ${why}`, "preemption", id]),
    ...now.hits.map(({ id, cached, donors }) => [`▲ request ${id}: ${plural(cached, "token")} found in the prefix cache` +
      (donors.length ? `, computed by ${who(donors)}` : ""), "hit", id]),
    ...(now.evicted.length ? [[`✕ ${plural(now.evicted.length, "cached block")} evicted, because no blank one was left: ${names(now.evicted)}`, "eviction"]] : []),
    ...explainQueue(now, ended),
    ...(now.ended.length ? [[`before it ended: ${who(now.ended)}`, null, now.ended[0]]] : []),
  ];
  $("events").replaceChildren(...lines.map(([line, topic, id]) => {
    const item = document.createElement("li"), words = document.createElement(id === undefined ? "span" : "button");
    words.textContent = line;
    if (id !== undefined) { words.type = "button"; words.title = `follow request ${id}`; words.addEventListener("click", () => choose(id)); }
    item.append(words);
    if (topic && data.guide[topic]) {
      const link = document.createElement("a");
      link.href = data.guide[topic];
      link.target = "_blank";
      link.textContent = "guide";
      item.append(" ", link);
    }
    return item;
  }));
}

// Why the requests that wait were not admitted in this step.
function explainQueue(now, ended) {
  if (ended || !data.charts.waiting[cursor]) return [];
  const spent = kinds.reduce((sum, name) => sum + data.charts[name][cursor], 0);
  if (now.held) return [[`○ request ${now.held[0]} waits: ${wereLacking(now.held[1])}`, "queue", now.held[0]]];
  if (now.preempted.length) return [["○ nobody is admitted, because this step preempted", "queue"]];
  if (data.rows && data.charts.running[cursor] >= data.rows) return [[`○ the others wait: all ${data.rows} rows are taken`, "queue"]];
  if (spent >= data.budget) return [["○ the others wait: the budget of tokens is spent", "queue"]];
  return [["○ the others wait until the last tokens of a preempted request are known", "queue"]];
}

// A request's decode steps are many: each run of them is one line of its life.
function lifeOf(request) {
  const decodes = request.life.filter(({ kind }) => kind === "decode").map(({ from, to }) =>
    [from, from === to ? "decodes one token" : `decodes, until step ${(to + 1).toLocaleString("en")}`]);
  const rank = (note) => (note[1].startsWith("ends") ? 0 : note[1].startsWith("is preempted") ? 1 : 2);
  return request.notes.concat(decodes).map((note, i) => [...note, i])
    .sort((a, b) => a[0] - b[0] || rank(a) - rank(b) || a[2] - b[2]);
}

let told = { id: null, shown: -1, spans: [], items: [], blocks: null };
function buildRequest() {
  const request = requests.get(chosen);
  $("hint").hidden = Boolean(request);
  $("request-title").textContent = request ? `Request ${chosen}` : "One request";
  if (document.activeElement !== $("request")) $("request").value = request ? chosen : "";
  told = { id: chosen, shown: -1, spans: [], items: [], blocks: null };
  if (!request) { $("life").replaceChildren(); return; }
  const state = document.createElement("p"), list = document.createElement("ol"), tokens = document.createElement("div"), blocks = document.createElement("div");
  for (const [step, text] of lifeOf(request)) {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.textContent = `${text.startsWith("ends") ? `after step ${step.toLocaleString("en")}` : `step ${(step + 1).toLocaleString("en")}`}: ${text}`;
    button.addEventListener("click", () => { pause(); go(step); });
    item.append(button);
    list.append(item);
    told.items.push([step, item]);
  }
  state.id = "request-state";
  tokens.id = "tokens";
  tokens.tabIndex = 0;  // the arrow keys scroll it
  tokens.setAttribute("role", "region");
  tokens.setAttribute("aria-label", "its tokens so far");
  blocks.id = "request-blocks";
  request.tokens.forEach((id, i) => {
    const span = document.createElement("span");
    span.textContent = data.texts[id] === undefined ? `[${id}]` : data.texts[id];
    span.title = `token ${i}, id ${id}`;
    span.className = i < request.numPrompt ? "" : "output future";
    tokens.append(span);
    told.spans.push(span);
  });
  const heading = (text) => { const h = document.createElement("h3"); h.textContent = text; return h; };
  $("life").replaceChildren(state, list, heading("its blocks now, in order"), blocks, heading("its tokens so far: the prompt, then what was sampled"), tokens);
  told.blocks = blocks;
}

function describeRequest(pool) {
  if (told.id !== chosen) buildRequest();
  const request = requests.get(chosen);
  if (!request) return;
  let shown = request.numPrompt;
  while (shown < request.at.length && request.at[shown] <= cursor) shown++;
  const before = Math.max(told.shown, request.numPrompt);
  for (let i = Math.min(before, shown); i < Math.max(before, shown); i++) told.spans[i].classList.toggle("future", i >= shown);
  if (shown !== told.shown) $("tokens").scrollTop = $("tokens").scrollHeight;
  told.shown = shown;
  let now = -1;
  told.items.forEach(([step], i) => { if (step <= cursor) now = i; });
  told.items.forEach(([, item], i) => item.classList.toggle("now", i === now));
  const list = $("life").querySelector("ol"), item = now >= 0 ? told.items[now][1] : null;
  if (item) list.scrollTop = item.offsetTop - list.offsetTop - list.clientHeight / 2;
  $("request-state").textContent = describeState(request);
  $("request-state").classList.toggle("ended", request.end !== null && request.end <= cursor);
  const table = pool.tables.get(chosen) || [];
  told.blocks.textContent = table.length ? table.map((b) => (pool.references[b] > 1 ? `${b}\u00a0(shared by ${pool.references[b]})` : b)).join(", ") : "none";
}

const REASONS = { stop: "it said all it had to say", length: "it reached its limit", abort: "it was aborted", error: "it failed" };

// What the chosen request does at the cursor.
function describeState(request) {
  if (request.notes[0][0] > cursor) return "It has not arrived yet.";
  if (request.end !== null && request.end <= cursor) {
    if (!request.reason) return "It has not ended: the recording stops here.";
    const why = REASONS[request.reason] ? ` (${request.reason}): ${REASONS[request.reason]}` : `: ${request.reason}`;
    return `It ended after step ${request.end.toLocaleString("en")}${why}. Its blocks were given back.`;
  }
  const now = request.life.find(({ from, to }) => from <= cursor && cursor <= to);
  return {
    waiting: "It waits in the queue.", preempted: "It was preempted, and waits to be computed again.",
    prefill: "Its prompt is computed in this step.", decode: "It decodes.",
  }[now ? now.kind : ""] || "It is resident, and has no token in this step.";
}

// ---------------------------------------------------------------- the controls

let wanted = false, timer = null, playing = null;
function show() {
  if (wanted) return;
  wanted = true;
  requestAnimationFrame(() => { wanted = false; draw(); });
}

function draw() {
  if (cursor < view.from || cursor >= view.to) {
    const span = view.to - view.from, from = Math.min(Math.max(cursor - Math.floor(span / 10), 0), numSteps - span);
    if (from !== view.from) { view = { from, to: from + span }; drawTimeline(); }
  }
  const pool = poolAt(cursor);
  drawCursor();
  drawBlocks(pool);
  describeStep(pool);
  describeRequest(pool);
  $("scrub").value = cursor;
  tellFrame();
}

// Two runs side by side (page.pair.html): the page around both passes on the other's step and its chosen request.
let announced = { step: 0, chosen: null };
function tellFrame() {
  if (window.parent === window || (cursor === announced.step && chosen === announced.chosen)) return;
  announced = { step: cursor, chosen };
  window.parent.postMessage(announced, "*");
}

function followFrame(event) {
  if (event.source !== window.parent || window.parent === window) return;
  if (Object.hasOwn(click, event.data.press)) click[event.data.press]();
  if (event.data.kind in isEvent) window.parent.postMessage({ found: findEvent(event.data.direction, event.data.kind) }, "*");
  if (!Number.isInteger(event.data.step)) return;
  pause();
  cursor = Math.min(Math.max(event.data.step, 0), numSteps);
  if (event.data.chosen !== undefined) choose(event.data.chosen);
  announced = { step: cursor, chosen };
  show();
}

function redraw() { readColors(); drawLegend(); drawTimeline(); layoutGrid(); show(); }

function go(position) {
  cursor = Math.min(Math.max(Math.round(position), 0), numSteps);
  show();
}

function choose(id) {
  chosen = requests.has(id) ? id : null;
  drawTimeline();
  show();
}

function announce(how) { for (const id of ["step-title", "events"]) $(id).setAttribute("aria-live", how); }

function pause() {
  playing = null;
  $("play").textContent = "▶ play";
  announce("polite");
}

function play() {
  if (playing) { pause(); return; }
  if (cursor >= numSteps) cursor = 0;
  const run = { start: performance.now(), from: cursor, speed: Number($("speed").value) };
  playing = run;
  $("play").textContent = "❚❚ pause";
  announce("off");
  const frame = (now) => {
    if (playing !== run) return;
    const position = Math.min(run.from + Math.floor(((now - run.start) / 1e3) * run.speed), numSteps);
    if (position !== cursor) { cursor = Math.max(position, cursor); draw(); }
    if (cursor >= numSteps) pause(); else requestAnimationFrame(frame);
  };
  requestAnimationFrame(frame);
}

// The next step with an event of a kind, or the one before; null if there is none.
function findEvent(direction, kind) {
  for (let k = cursor + direction; k >= 0 && k < numSteps; k += direction) if (isEvent[kind](steps[k])) return k;
  return null;
}

function jump(direction) {
  const found = findEvent(direction, $("kind").value);
  pause();
  if (found !== null) go(found);
}

// Six stops: what is marked, the step that is shown, and the words.
const firstWith = (kind) => Math.max(steps.findIndex(isEvent[kind]), 0);
const TOUR = [
  ["timeline", () => 0, "Every column is one step of the engine. In this one the first prompts are computed."],
  ["timeline", () => Math.max(data.charts.decode ? data.charts.decode.findIndex((n) => n > 0) : 0, 0),
    "Requests whose prompt is computed decode: they get a token in each step. New prompts are computed beside them."],
  ["pool", () => firstWith("hit"), "Each square is a block of the KV cache, with its owner. A request that begins as an earlier one shares its blocks."],
  ["events", () => firstWith("any"), "What happened in a step, and why, stands here. Choose a line to follow its request."],
  ["story", () => firstWith("preemption"), "One request: its life, its blocks and its text. Choose it by its block, its bar or its number."],
  ["controls", () => 0, "Play the run here, or go from event to event. At the bottom are the keys. Now explore."],
];
let stop = -1;

function visit(next) {
  for (const marked of document.querySelectorAll(".marked")) marked.classList.remove("marked");
  stop = next < TOUR.length ? next : -1;
  $("tour").hidden = stop < 0;
  if (stop < 0) return;
  const [id, step, words] = TOUR[stop];
  $(id).classList.add("marked");
  $("tour-words").textContent = `${stop + 1} of ${TOUR.length}. ${words}`;
  $("tour-next").textContent = stop === TOUR.length - 1 ? "done" : "next";
  pause();
  go(step());
}

// A browser may keep nothing for a page: then the tour begins at every visit.
function isFirstVisit() {
  try {
    const known = localStorage.getItem("nanovllm-tour");
    localStorage.setItem("nanovllm-tour", "seen");
    return known === null;
  } catch { return true; }
}

function zoom(factor, center = cursor) {
  const span = Math.min(Math.max(Math.round((view.to - view.from) * factor), Math.min(10, numSteps)), numSteps);
  const share = Math.min(Math.max((center - view.from) / (view.to - view.from), 0), 1);
  const from = Math.min(Math.max(Math.round(center - share * span), 0), numSteps - span);
  view = { from, to: from + span };
  drawTimeline();
  show();
}

function neighbour(direction) {
  const at = order.indexOf(chosen);
  choose(order[at < 0 ? (direction > 0 ? 0 : order.length - 1) : Math.min(Math.max(at + direction, 0), order.length - 1)]);
}

function stepUnder(event) {
  const width = $("lanes").clientWidth;
  const share = (event.offsetX - LEFT) / (width - LEFT - RIGHT);
  return Math.min(Math.max(Math.floor(view.from + share * (view.to - view.from)), 0), numSteps - 1);
}

let click = {};
function bind() {
  click = {
    first: () => { pause(); go(0); }, last: () => { pause(); go(numSteps); }, play,
    back: () => { pause(); go(cursor - 1); }, forward: () => { pause(); go(cursor + 1); },
    "next-event": () => jump(1), "previous-event": () => jump(-1),
    "zoom-in": () => zoom(0.5), "zoom-out": () => zoom(2), "zoom-all": () => zoom(Infinity),
    "previous-request": () => neighbour(-1), "next-request": () => neighbour(1), "no-request": () => choose(null),
    "tour-again": () => visit(0), "tour-next": () => visit(stop + 1), "tour-end": () => visit(TOUR.length),
    theme: () => {
      document.documentElement.dataset.theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
      redraw();
    },
  };
  for (const [id, action] of Object.entries(click)) $(id).addEventListener("click", action);
  $("speed").addEventListener("change", () => { if (playing) { pause(); play(); } });
  $("scrub").max = numSteps;
  $("scrub").addEventListener("input", () => { pause(); go(Number($("scrub").value)); });
  $("request").addEventListener("input", () => choose(parseInt($("request").value, 10)));

  let dragging = false;
  $("lanes").addEventListener("pointerdown", (event) => {
    pause();
    dragging = true;
    $("lanes").setPointerCapture(event.pointerId);
    go(stepUnder(event));
    const lane = lanes[lanes.length - 1], row = Math.floor(((event.offsetY - lane.y) / lane.h) * rows.length);
    if (event.offsetY >= lane.y && row < rows.length) choose(rows[row]);
  });
  $("lanes").addEventListener("pointermove", (event) => { if (dragging) go(stepUnder(event)); });
  $("lanes").addEventListener("pointerup", () => { dragging = false; });
  $("lanes").addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;  // the page scrolls
    event.preventDefault();
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, stepUnder(event));
  }, { passive: false });
  $("blocks").addEventListener("click", (event) => {
    const block = Math.floor(event.offsetY / grid.size) * grid.across + Math.floor(event.offsetX / grid.size);
    const owners = [...poolAt(cursor).tables].filter(([, blocks]) => blocks.includes(block)).map(([id]) => id);
    choose(owners.length ? owners[(owners.indexOf(chosen) + 1) % owners.length] : null);  // again: the next sharer
  });

  const keys = {
    ArrowLeft: (e) => { pause(); go(cursor - (e.shiftKey ? 10 : 1)); }, ArrowRight: (e) => { pause(); go(cursor + (e.shiftKey ? 10 : 1)); },
    Home: click.first, End: click.last, n: click["next-event"], p: click["previous-event"], "[": click["previous-request"],
    "]": click["next-request"], Escape: click["no-request"], "+": click["zoom-in"], "=": click["zoom-in"],
    "-": click["zoom-out"], 0: click["zoom-all"], " ": play,
  };
  document.addEventListener("keydown", (event) => {
    const target = event.target, action = keys[event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.matches("select") || (target.matches("input[type=number]") && event.key !== "Escape")) return;
    if (event.key === " " && target.matches("button")) return;  // space presses the button that has the focus
    event.preventDefault();
    action(event);
  });
  window.addEventListener("message", followFrame);
  window.addEventListener("resize", () => { clearTimeout(timer); timer = setTimeout(redraw, 60); });
}

function introduce() {
  document.title = `${data.title}: a run of nano-vLLM`;
  $("about").textContent = `${data.title}: ${plural(requests.size, "request")} on ${data.device}. A step computes prompts ` +
    "(prefill), and one token more of each running request (decode). Requests with the same beginning share blocks.";
  definitions($("totals"), [
    ["steps", numSteps, "total-steps"], ["prompt tokens", totals.prompt, "total-prompt"],
    ["of them cached", totals.cached, "total-cached"], ["generated", totals.generated, "total-generated"],
    ["preemptions", totals.preemptions, "total-preemptions"], ["evictions", totals.evictions, "total-evictions"],
    ["free blocks at the end", atEnd.cached + atEnd.blank, "total-free"],
  ]);
  const notice = data.stopped ? "Recording stopped before the run did: 100,000 events are the most that a trace holds."
    : data.complete ? "" : "The end of the trace is missing: the run was killed, or is still going on.";
  $("notice").textContent = notice;
  $("notice").hidden = !notice;
}

document.documentElement.classList.toggle("framed", window.parent !== window);
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
introduce();
bind();
redraw();
if (window.parent === window && isFirstVisit()) visit(0);
