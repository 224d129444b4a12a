// Draws the lanes of all programs on one canvas, over one time scale, and says what an event is.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const canvas = document.getElementById("canvas");
const pen = canvas.getContext("2d");
const tip = document.getElementById("tip");

// Pixels: the names of the lanes at the left, the axis on top, and each program's rows below it.
const LEFT = 66, RIGHT = 8, AXIS = 22, HEADING = 24, GAP = 12;
const HEIGHTS = { stages: 24, compute: 36, link: 36 };
const SHORTEST = 0.05; // microseconds on screen at most zoom

const rows = []; // a lane of a program each: where it is drawn, and its events
const headings = [];
let height = AXIS;
data.programs.forEach((program, number) => {
  headings.push({ text: program.heading, top: height });
  height += HEADING;
  for (const [lane, list] of Object.entries(program.lanes)) {
    const row = { program: number, lane, top: height, height: HEIGHTS[lane] };
    row.events = list.map(([start, end, kind, transfer]) =>
      ({ start, end, row, transfer, ...program.kinds[kind] }));
    rows.push(row);
    height += HEIGHTS[lane] + 2;
  }
  height += GAP;
});
for (const row of rows) {
  // Compute stands still until the end of a message that it waits for.
  row.waits = row.lane !== "compute" ? [] : rowOf(row.program, "link").events
    .filter((event) => event.transfer.exposed)
    .map((event) => ({ start: event.end - event.transfer.exposed, end: event.end, event }));
}
const whole = Math.max(...data.programs.map((program) => program.step));
const view = { start: 0, length: whole };
const hatch = makeHatch();
let width = 0, hovered = null, pinned = null, pointer = 0, drag = null, waiting = false;

function makeHatch() {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const brush = tile.getContext("2d");
  brush.fillStyle = "#ffffff";
  brush.fillRect(0, 0, 8, 8);
  brush.strokeStyle = data.exposed;
  for (const shift of [-8, 0, 8]) {
    brush.moveTo(shift - 1, 9);
    brush.lineTo(shift + 9, -1);
  }
  brush.stroke();
  return pen.createPattern(tile, "repeat");
}

function rowOf(program, lane) {
  return rows.find((row) => row.program === program && row.lane === lane);
}

function time(microseconds, step = microseconds / 1000) {
  const [value, unit, grain] = Math.abs(microseconds) < 1000
    ? [microseconds, "µs", step] : [microseconds / 1000, "ms", step / 1000];
  const digits = Math.min(6, Math.max(0, Math.ceil(-Math.log10(grain || 1))));
  return `${Number(value.toFixed(digits))} ${unit}`;
}

const perMicrosecond = () => (width - LEFT - RIGHT) / view.length;
const xOf = (microseconds) => LEFT + (microseconds - view.start) * perMicrosecond();
const timeAt = (x) => view.start + (x - LEFT) / perMicrosecond();

// The index of the first event that ends after a time: those of a lane follow one another.
function firstEndingAfter(events, microseconds, from = 0) {
  let low = from, high = events.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (events[middle].end > microseconds) high = middle; else low = middle + 1;
  }
  return low;
}

// What is on screen. Of events within one pixel the first stands for all.
function* visible(events) {
  let at = firstEndingAfter(events, view.start), free = LEFT;
  while (at < events.length && events[at].start < view.start + view.length) {
    const left = Math.max(free, Math.floor(xOf(events[at].start)));
    const right = Math.min(width - RIGHT, xOf(events[at].end));
    yield [events[at], left, Math.max(1, right - left)];
    free = left + 1;
    at = firstEndingAfter(events, timeAt(free), at + 1);
  }
}

function draw() {
  waiting = false;
  const style = getComputedStyle(document.documentElement);
  const [ink, quiet, line] = ["--ink", "--quiet", "--line"].map((n) => style.getPropertyValue(n));
  const scale = window.devicePixelRatio || 1;
  width = canvas.clientWidth;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.height = `${height}px`;
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.font = "12px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawAxis(quiet, line);
  pen.fillStyle = ink;
  for (const heading of headings) pen.fillText(heading.text, LEFT, heading.top + HEADING / 2);
  for (const row of rows) drawRow(row, quiet);
  for (const event of new Set([hovered, pinned])) if (event) outline(event, ink);
  const end = view.start + view.length;
  document.getElementById("range").value =
    `${time(view.start, view.length / 1000)} to ${time(end, view.length / 1000)}`;
  placeTip();
}

function drawAxis(quiet, line) {
  const rough = view.length / Math.max(2, (width - LEFT) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * power >= rough) * power;
  for (let n = Math.ceil(view.start / step); n * step <= view.start + view.length; n++) {
    pen.fillStyle = line;
    pen.fillRect(Math.round(xOf(n * step)), AXIS, 1, height - AXIS);
    pen.fillStyle = quiet;
    const text = time(n * step, step), left = xOf(n * step) + 3;
    if (left + pen.measureText(text).width < width) pen.fillText(text, left, AXIS / 2);
  }
}

function drawRow(row, quiet) {
  const middle = row.top + row.height / 2;
  pen.fillStyle = quiet;
  pen.fillText(row.lane, 4, middle);
  for (const [event, left, size] of visible(row.events)) {
    pen.fillStyle = event.colour;
    // A gap between neighbours, where there is room for one.
    pen.fillRect(left, row.top, size > 3 ? size - 1 : size, row.height);
    // Of a kernel the operation: its stage stands above it. On a light colour, in both schemes.
    const text = row.lane === "compute" ? event.label.split("/").pop() : event.label;
    label(text, left, size, middle, "#222222");
    if (event.transfer?.exposed) {
      pen.fillStyle = data.exposed;
      const from = Math.max(left, xOf(event.end - event.transfer.exposed));
      pen.fillRect(from, row.top + row.height - 4, Math.max(1, left + size - from), 4);
    }
  }
  for (const [wait, left, size] of visible(row.waits)) {
    pen.fillStyle = size > 3 ? hatch : data.exposed;
    pen.fillRect(left, row.top, size, row.height);
    label(`exposed ${time(wait.end - wait.start)}`, left, size, middle, data.exposed, "#ffffff");
  }
}

// As much of a text as its box has room for.
function label(text, left, size, middle, colour, patch = null) {
  const room = size - 8;
  if (room < 24) return;
  let shown = text;
  for (let letters = text.length - 1; pen.measureText(shown).width > room; letters--) {
    shown = `${text.slice(0, letters)}…`;
  }
  if (patch) {
    pen.fillStyle = patch;
    pen.fillRect(left + 2, middle - 9, pen.measureText(shown).width + 4, 18);
  }
  pen.fillStyle = colour;
  pen.fillText(shown, left + 4, middle);
}

function outline(event, ink) {
  const left = Math.max(LEFT, xOf(event.start)), right = Math.min(width - RIGHT, xOf(event.end));
  if (right < LEFT || left > width - RIGHT) return;
  pen.strokeStyle = ink;
  pen.lineWidth = event === pinned ? 3 : 1.5;
  pen.strokeRect(left - 1, event.row.top - 1, Math.max(2, right - left) + 1, event.row.height + 1);
}

function redraw() {
  if (!waiting) requestAnimationFrame(draw);
  waiting = true;
}

function show(start, length) {
  view.length = Math.min(whole, Math.max(SHORTEST, length));
  view.start = Math.min(whole - view.length, Math.max(0, start));
  redraw();
}

function zoom(factor, at = view.start + view.length / 2) {
  const length = Math.min(whole, Math.max(SHORTEST, view.length * factor));
  show(at - (at - view.start) * (length / view.length), length);
}

const pan = (share) => show(view.start + share * view.length, view.length);

function zoomTo(event) {
  const length = Math.max((event.end - event.start) * 6, 4);
  show((event.start + event.end - length) / 2, length);
}

function pin(event) {
  pinned = event;
  hovered = null;
  pointer = event ? xOf((event.start + event.end) / 2) : 0;
  describe(event);
  redraw();
}

function hover(event, x) {
  if (event !== hovered) {
    hovered = event;
    if (!pinned) describe(event);
    redraw();
  }
  if (!pinned) {
    pointer = x;
    placeTip();
  }
}

function describe(event) {
  tip.hidden = !event;
  tip.classList.toggle("pinned", event !== null && event === pinned);
  tip.replaceChildren();
  if (!event) return;
  const name = document.createElement("strong");
  name.textContent = event.label;
  const list = document.createElement("dl");
  for (const [term, text] of facts(event)) {
    for (const [tag, content] of [["dt", term], ["dd", text]]) {
      list.appendChild(document.createElement(tag)).textContent = content;
    }
  }
  tip.append(name, list);
}

function facts(event) {
  const found = [["scope", event.scope || "outside the stages"]];
  if (event.instruction) found.unshift(["instruction", event.instruction]);
  found.push(["start", time(event.start, 0.001)], ["duration", time(event.end - event.start)]);
  const transfer = event.transfer;
  if (transfer) {
    const beside = transfer.beside.map(([name, spent]) => `${name} ${time(spent)}`);
    if (transfer.more) beside.push(`${transfer.more} more`);
    found.push(["kind", transfer.kind], ["sent", transfer.sent], ["hidden", time(transfer.hidden)],
      ["exposed", time(transfer.exposed)]);
    if (transfer.reason) found.push(["reason", transfer.reason]);
    found.push(["beside it", beside.join(", ") || "nothing"]);
  }
  if (event.source) found.push(["source", event.source]);
  return found;
}

// Below the row of what it describes, or above it where that is off the window.
function placeTip() {
  const event = pinned || hovered;
  if (!event) return;
  if (pinned) pointer = xOf((Math.max(event.start, view.start)
    + Math.min(event.end, view.start + view.length)) / 2);
  const left = Math.max(0, Math.min(pointer + 12, width - tip.offsetWidth));
  tip.style.left = `${left}px`;
  const below = event.row.top + event.row.height + 6, above = event.row.top - tip.offsetHeight - 6;
  const top = canvas.getBoundingClientRect().top;
  const low = top + below + tip.offsetHeight > window.innerHeight && top + above >= 0;
  tip.style.top = `${low ? above : below}px`;
}

// The event within two pixels of a point, or the message that compute waits for there.
function hit(x, y) {
  const row = rows.find((r) => y >= r.top && y < r.top + r.height);
  if (!row || x < LEFT) return null;
  const [from, to] = [timeAt(x - 2), timeAt(x + 2)], at = timeAt(x);
  const inside = (found) => found && found.start <= at && found.end >= at;
  const exact = row.events[firstEndingAfter(row.events, at)];
  if (inside(exact)) return exact;
  const wait = row.waits[firstEndingAfter(row.waits, at)];
  if (inside(wait)) return wait.event;
  const near = row.events[firstEndingAfter(row.events, from)];
  return near && near.start <= to ? near : null;
}

// To another lane at the same time, or along the lane.
function walk(rowsBy, eventsBy) {
  if (!pinned) {
    const first = rows.find((row) => row.events.length);
    const seen = firstEndingAfter(first.events, view.start);
    return pin(first.events[Math.min(seen, first.events.length - 1)]);
  }
  const filled = rows.filter((row) => row.events.length);
  const row = filled[filled.indexOf(pinned.row) + rowsBy];
  if (!row) return;
  const at = rowsBy
    ? firstEndingAfter(row.events, pinned.start) : row.events.indexOf(pinned) + eventsBy;
  const next = row.events[Math.min(row.events.length - 1, Math.max(0, at))];
  pin(next);
  if (next.end < view.start || next.start > view.start + view.length) {
    show((next.start + next.end - view.length) / 2, view.length);
  }
}

const actions = {
  in: () => zoom(0.5), out: () => zoom(2), left: () => pan(-0.25), right: () => pan(0.25),
  all: () => show(0, whole),
};
const keys = {
  "+": actions.in, "=": actions.in, "-": actions.out, Home: actions.all,
  ArrowLeft: (shift) => (shift ? pan(-0.25) : walk(0, -1)),
  ArrowRight: (shift) => (shift ? pan(0.25) : walk(0, 1)),
  ArrowUp: () => walk(-1, 0), ArrowDown: () => walk(1, 0),
  Enter: () => pinned && zoomTo(pinned), Escape: () => pin(null),
};

canvas.addEventListener("keydown", (event) => {
  if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  keys[event.key](event.shiftKey);
});
canvas.addEventListener("wheel", (event) => {
  event.preventDefault();
  const unit = event.deltaMode === WheelEvent.DOM_DELTA_PIXEL ? 1 : 30; // else lines
  const sideways = event.deltaX || (event.shiftKey ? event.deltaY : 0);
  if (sideways && Math.abs(sideways) >= Math.abs(event.deltaY)) pan(sideways * unit / 800);
  else zoom(Math.exp(event.deltaY * unit / 400), timeAt(Math.max(LEFT, event.offsetX)));
}, { passive: false });
canvas.addEventListener("pointerdown", (event) => {
  drag = { x: event.offsetX, start: view.start, moved: false };
  canvas.setPointerCapture(event.pointerId);
});
canvas.addEventListener("pointermove", (event) => {
  if (!drag) return hover(hit(event.offsetX, event.offsetY), event.offsetX);
  drag.moved ||= Math.abs(event.offsetX - drag.x) > 3;
  if (drag.moved) show(drag.start - (event.offsetX - drag.x) / perMicrosecond(), view.length);
});
canvas.addEventListener("pointerup", (event) => {
  if (drag && !drag.moved) pin(hit(event.offsetX, event.offsetY));
  drag = null;
});
canvas.addEventListener("pointercancel", () => { drag = null; });
canvas.addEventListener("pointerleave", () => hover(null, 0));
canvas.addEventListener("dblclick", () => pinned && zoomTo(pinned));
document.addEventListener("click", ({ target }) => {
  const button = target.closest("button");
  if (button?.dataset.do) actions[button.dataset.do]();
  if (!button?.classList.contains("jump")) return;
  const { program, lane, number } = button.dataset;
  const event = rowOf(Number(program), lane).events[Number(number)];
  zoomTo(event);
  pin(event);
  canvas.scrollIntoView({ block: "nearest" });
  canvas.focus({ preventScroll: true });
});
new ResizeObserver(redraw).observe(canvas);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
draw();
