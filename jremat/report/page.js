"use strict";
// A chart of what is alive at each moment, for pointer and keyboard, and the filter of the table of values.
const NS = "http://www.w3.org/2000/svg";
const data = JSON.parse(document.getElementById("data").textContent);
const WIDTH = 1160, HEIGHT = 400, LEFT = 62, RIGHT = 12, TOP = 14, BOTTOM = 46;
// Neighbours differ in lightness, and every second one is hatched: readable in grey.
const PAINT = data.paint;
const PHASE = { forward: "#dfe7f2", backward: "#c3cbd6", recompute: "#f6e7c4", update: "#ffffff" };

// One scale for all charts of a page, so that they can be compared by eye.
const TOP_BYTES = data.timelines.reduce((most, one) => Math.max(most, one.peak_bytes), 1) * 1.04;

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (bytes >= 1024 && k < 4) { bytes /= 1024; k++; }
  return (k ? bytes.toFixed(1) : bytes) + " " + units[k];
}
function node(name, attributes, parent) {
  const made = document.createElementNS(NS, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (parent) parent.appendChild(made);
  return made;
}
function html(name, text, parent, cls) {
  const made = document.createElement(name);
  if (text !== null) made.textContent = text;
  if (cls) made.className = cls;
  if (parent) parent.appendChild(made);
  return made;
}
function hatch(defs, id, colour, kind) {
  const pattern = node("pattern", { id, width: 7, height: 7, patternUnits: "userSpaceOnUse" }, defs);
  node("rect", { width: 7, height: 7, fill: colour }, pattern);
  const line = { stroke: "#0006", "stroke-width": 1, fill: "none" };
  if (kind === "/" || kind === "x") node("path", { d: "M-1,8 L8,-1", ...line }, pattern);
  if (kind === "x") node("path", { d: "M-1,-1 L8,8", ...line }, pattern);
  if (kind === ".") node("circle", { cx: 3.5, cy: 3.5, r: 1.1, fill: "#0007" }, pattern);
}

class Chart {
  constructor(root, timeline, index) {
    Object.assign(this, { root, timeline, index, steps: timeline.points.length, at: timeline.peak_step });
    this.box = root.querySelector(".chart");
    this.top = TOP_BYTES;
    this.draw();
    this.listen();
    this.go(this.at, false);
  }
  x(step) { return LEFT + (step * (WIDTH - LEFT - RIGHT)) / Math.max(this.steps, 1); }
  y(bytes) { return HEIGHT - BOTTOM - (bytes * (HEIGHT - TOP - BOTTOM)) / this.top; }
  paint(line) { const [colour, kind] = PAINT[line] || PAINT.other; return kind ? `url(#${this.id(line)})` : colour; }
  id(line) { return `p${this.index}-${line.replace(/\W+/g, "-")}`; }

  draw() {
    this.svg = node("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" }, this.box);
    const defs = node("defs", {}, this.svg);
    for (const [line] of this.timeline.lines) {
      const [colour, kind] = PAINT[line] || PAINT.other;
      if (kind) hatch(defs, this.id(line), colour, kind);
    }
    this.scale();
    let below = new Array(this.steps).fill(0);
    for (const [line, values] of this.timeline.lines) {
      const above = values.map((value, k) => below[k] + value);
      const up = above.map((value, k) => `H${this.x(k).toFixed(1)}V${this.y(value).toFixed(1)}H${this.x(k + 1).toFixed(1)}`);
      const down = below.map((value, k) => `V${this.y(value).toFixed(1)}H${this.x(k).toFixed(1)}`).reverse();
      node("path", {
        d: `M${LEFT},${this.y(below[0] || 0)}${up.join("")}${down.join("")}Z`, fill: this.paint(line),
        stroke: "#fff", "stroke-width": .6, "data-line": line,
      }, this.svg);
      below = above;
    }
    this.phases();
    this.life = node("path", { class: "life", d: "" }, this.svg);
    this.cursor = node("path", { class: "cursor", d: "" }, this.svg);
    this.tip = html("div", "", this.box, "tip");
    this.tip.hidden = true;
  }
  scale() {
    const unit = 1024 ** Math.floor(Math.log(this.top) / Math.log(1024));
    const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500].find((step) => this.top / unit / step <= 6) || 1;
    for (let tick = 0; tick * unit <= this.top; tick += steps) {
      const y = this.y(tick * unit);
      node("path", { d: `M${LEFT},${y}H${WIDTH - RIGHT}`, stroke: "#8884", "stroke-width": 1 }, this.svg);
      node("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, this.svg).textContent = tick ? size(tick * unit) : "0";
    }
  }
  phases() {
    const y = HEIGHT - BOTTOM + 6, points = this.timeline.points;
    for (let k = 0, start = 0; k <= points.length; k++) {
      if (k < points.length && k > start && points[k].phase === points[start].phase) continue;
      if (k === start) continue;
      const width = this.x(k) - this.x(start), phase = points[start].phase;
      node("rect", { x: this.x(start), y, width, height: 13, fill: PHASE[phase] || "#fff", stroke: "#888", "stroke-width": .4 }, this.svg);
      if (width > 62) node("text", { x: this.x(start) + width / 2, y: y + 10.5, "text-anchor": "middle", style: "fill:#333" }, this.svg).textContent = phase;
      start = k;
    }
    for (let k = 0, start = -1; k <= points.length; k++) {
      const inside = k < points.length && points[k].depth > 0;
      if (inside && start < 0) start = k;
      if (!inside && start >= 0) {
        const a = this.x(start), b = this.x(k);
        node("path", { d: `M${a},${y + 18}v4H${b}v-4`, stroke: "#888", fill: "none" }, this.svg);
        if (b - a > 90) node("text", { x: (a + b) / 2, y: y + 34, "text-anchor": "middle" }, this.svg).textContent = "a loop's body, once";
        start = -1;
      }
    }
  }

  listen() {
    const keys = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: 10, PageDown: -10 };
    this.box.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (event.key in keys) this.go(this.at + keys[event.key] * (event.shiftKey ? 10 : 1), false);
      else if (event.key === "Home") this.go(0, false);
      else if (event.key === "End") this.go(this.steps - 1, false);
      else if (event.key === "p" || event.key === "P") this.go(this.timeline.peak_step, false);
      else return;
      event.preventDefault();
    });
    this.box.addEventListener("pointermove", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => { this.tip.hidden = true; this.life.setAttribute("d", ""); });
    this.box.addEventListener("click", (event) => this.point(event));
    this.root.querySelector("button").addEventListener("click", () => { this.go(this.timeline.peak_step, false); this.box.focus(); });
  }
  point(event) {
    const frame = this.svg.getBoundingClientRect(), ratio = WIDTH / frame.width;
    const step = Math.floor(((event.clientX - frame.left) * ratio - LEFT) / (WIDTH - LEFT - RIGHT) * this.steps);
    if (step < 0 || step >= this.steps) { this.tip.hidden = true; return; }
    this.go(step, true);
    const y = (event.clientY - frame.top) * ratio;
    const bytes = ((HEIGHT - BOTTOM - y) * this.top) / (HEIGHT - TOP - BOTTOM);
    const found = bytes >= 0 ? this.under(step, bytes) : null;
    this.tip.hidden = !found;
    if (!found) { this.life.setAttribute("d", ""); return; }
    this.tip.textContent = found.text;
    const px = (event.clientX - frame.left), wide = this.tip.offsetWidth;
    this.tip.style.left = `${px + wide + 24 > frame.width ? px - wide - 14 : px + 14}px`;
    this.tip.style.top = `${Math.max(0, event.clientY - frame.top - 12)}px`;
  }
  under(step, bytes) {
    let low = 0;
    for (const [line, values] of this.timeline.lines) {
      if (bytes < low + values[step]) return this.within(step, line, low, bytes, values[step]);
      low += values[step];
    }
    return null;
  }
  within(step, line, low, bytes, total) {
    for (const buffer of this.alive(step).filter((one) => data.lines[one.kind] === line)) {
      if (bytes < low + buffer.nbytes) {
        const a = this.x(buffer.born), b = this.x(buffer.dies + 1), y = this.y(low + buffer.nbytes);
        this.life.setAttribute("d", `M${a},${y}H${b}V${this.y(low)}H${a}Z`);
        const copies = buffer.copies > 1 ? `, ${buffer.copies} copies` : "";
        return { text: `${buffer.name}  ${size(buffer.nbytes)}\n${buffer.dtype}[${buffer.shape}]${copies}\n${line}\n${buffer.source}\nalive from ${buffer.born} to ${buffer.dies}` };
      }
      low += buffer.nbytes;
    }
    this.life.setAttribute("d", "");
    return { text: `${line}  ${size(total)}\nsmall values` };
  }
  alive(step) { return this.timeline.buffers.filter((one) => one.born <= step && step <= one.dies); }

  go(step, hover) {
    this.at = Math.min(Math.max(step, 0), this.steps - 1);
    if (this.at < 0) return;
    const point = this.timeline.points[this.at], x = (this.x(this.at) + this.x(this.at + 1)) / 2;
    this.cursor.setAttribute("d", `M${x},${TOP - 6}V${HEIGHT - BOTTOM + 20}`);
    if (!hover) { this.tip.hidden = true; this.life.setAttribute("d", ""); }
    const what = point.operation + (point.place ? ` of ${point.place}` : "");
    const said = `moment ${this.at} of ${this.steps - 1}, ${point.phase}: ${what}${point.source ? `, ${point.source}` : ""}; ${size(point.alive_bytes)} alive`;
    this.box.setAttribute("aria-valuenow", this.at);
    this.box.setAttribute("aria-valuetext", said + (this.at === this.timeline.peak_step ? ", the peak" : ""));
    const now = this.root.querySelector(".now");
    now.replaceChildren();
    html("b", size(point.alive_bytes), now);
    now.append(` alive at moment ${this.at} of ${this.steps - 1}${this.at === this.timeline.peak_step ? ", the peak" : ""}`);
    html("br", null, now);
    now.append(`${point.phase}: ${what} `);
    html("code", point.source, now);
    this.tables(this.at);
  }
  swatch(line, parent) {
    const box = node("svg", { class: "swatch", viewBox: "0 0 24 14", "aria-hidden": "true" }, parent);
    node("rect", { width: 24, height: 14, fill: this.paint(line) }, box);
  }
  tables(step) {
    const legend = this.root.querySelector(".legend tbody"), alive = this.root.querySelector(".alive tbody");
    legend.replaceChildren();
    for (const [line, values] of [...this.timeline.lines].reverse()) {
      const row = html("tr", null, legend), head = html("th", null, row);
      head.scope = "row";
      this.swatch(line, head);
      head.append(line);
      html("td", values[step] ? size(values[step]) : "–", row, "n");
    }
    alive.replaceChildren();
    for (const buffer of this.alive(step).slice(0, 10)) {
      const row = html("tr", null, alive);
      html("td", buffer.name, row, "value");
      html("td", size(buffer.nbytes), row, "n");
      const line = html("td", null, row, "line");
      this.swatch(data.lines[buffer.kind], line);
      line.append(data.lines[buffer.kind]);
      html("td", buffer.source.split(" ")[0], row, "source").title = buffer.source;
    }
  }
}

document.querySelectorAll(".timeline").forEach((root, k) => new Chart(root, data.timelines[k], k));

const filter = document.querySelector(".filter"), values = document.querySelector("#values table");
if (filter && values) {
  filter.hidden = false;
  const apply = () => filter.querySelectorAll("input").forEach((box) => values.classList.toggle(`hide-${box.value}`, !box.checked));
  filter.addEventListener("change", apply);
  apply();
}
