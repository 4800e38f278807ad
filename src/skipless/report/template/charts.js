"use strict";
// Line charts by block or by step, as SVG drawn to the width there is. Text goes in as text, never as markup.

const SVG = document.querySelector("svg") ? document.querySelector("svg").namespaceURI : "";
const DASHES = ["", "7 3", "2 3", "9 3 2 3", "4 2", "11 2 2 2 2 2", "12 4"];
const PAD = { left: 46, right: 12, top: 10, bottom: 26 };

function svg(parent, tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function html(parent, tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

// A name that may be broken between its words.
function breakable(name) {
  return name.replace(/([a-z])(?=[A-Z])|(\w[./_])(?=[A-Za-z_])/g, "$&\u200b");
}

function words(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

// Every network and run has its own colour and its own dashes.
function look(index) {
  return { class: `line k${index % 7}`, "stroke-dasharray": DASHES[(index + Math.floor(index / 7)) % DASHES.length] };
}

function drawKey(node, index) {
  node.replaceChildren();
  svg(node, "line", { ...look(index), x1: 0, x2: 28, y1: 5, y2: 5 });
}

function niceSteps(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let t = Math.ceil(low / step - 1e-9); t * step <= high + step * 1e-9; t++) ticks.push(Number((t * step).toPrecision(12)));
  return ticks;
}

function logSteps(low, high) {
  const from = Math.ceil(low - 1e-9), to = Math.floor(high + 1e-9);
  if (to - from < 1) return niceSteps(10 ** low, 10 ** high, 4).filter((t) => t > 0);
  const every = Math.max(1, Math.ceil((to - from) / 5));
  const ticks = [];
  for (let t = from; t <= to; t++) if (t % every === 0) ticks.push(10 ** t);
  return ticks;
}

// The vertical scale of a chart: its limits, whether logarithmic, and value → share of the height.
// settle: the first tenth may rise above it, so that what follows is not pressed flat.
function verticalScale(spec, series) {
  const xs = series.flatMap((s) => s.x);
  const from = spec.settle ? Math.min(...xs) + 0.1 * (Math.max(...xs) - Math.min(...xs)) : -Infinity;
  const late = (s, list) => (list || []).filter((_, i) => s.x[i] >= from);
  let values = series.flatMap((s) => [s.y, s.faint, s.low, s.high, s.dots].flatMap((list) => late(s, list))).filter((v) => v !== null);
  const positive = values.filter((v) => v > 0), reached = positive.concat(spec.reference ?? []);
  const spread = positive.length ? Math.max(...reached) / Math.min(...reached) : 1;
  const log = Boolean(spec.mayBeLog) && positive.length > 0 && spread > (spec.logAbove ?? 30);
  if (log) values = positive;
  if (spec.reference !== undefined) values = values.concat(spec.reference);
  if (spec.include) values = values.concat(spec.include);
  let low = Math.min(...values), high = Math.max(...values);
  if (log) [low, high] = [Math.log10(low), Math.log10(high)];
  if (high - low < 1e-9) [low, high] = log ? [low - 1, high + 1] : [low - 0.5 * (Math.abs(low) || 1), high + 0.5 * (Math.abs(high) || 1)];
  else if (!spec.include || log) [low, high] = [low - 0.05 * (high - low), high + 0.05 * (high - low)];
  if (spec.floor !== undefined && !log) low = Math.max(low, spec.floor);
  const share = (v) => (log ? (v > 0 ? (Math.log10(v) - low) / (high - low) : null) : (v - low) / (high - low));
  return { share, ticks: log ? logSteps(low, high) : niceSteps(low, high, 4) };
}

// Points as path data; what is missing breaks the line.
function pathOf(points) {
  let data = "", pen = false;
  for (const p of points) {
    if (!p) { pen = false; continue; }
    data += `${pen ? "L" : "M"}${p[0].toFixed(1)} ${p[1].toFixed(1)}`;
    pen = true;
  }
  return data;
}

class Chart {
  // spec: title, note, xName(x), mayBeLog, logAbove, reference, include, floor; onPick(x) and onPoint(x or null) tell of the pointer.
  constructor(holder, spec) {
    this.spec = spec;
    this.series = [];
    this.at = null;
    const box = (this.box = html(holder, "div", "chart"));
    html(box, "h3", "", spec.title);
    html(box, "p", "note", spec.note);
    this.plot = svg(box, "svg", { class: "plot", role: "img", "aria-label": `${spec.title}. ${spec.note}` });
    this.values = html(box, "ul", "values");
    this.plot.addEventListener("pointermove", (event) => spec.onPoint(this.nearest(event)));
    this.plot.addEventListener("pointerleave", () => spec.onPoint(null));
    this.plot.addEventListener("click", (event) => spec.onPick(this.nearest(event)));
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  show(series) {
    this.series = series.filter((s) => s.y.some((v) => v !== null));
    this.box.hidden = !this.series.length; // nobody shown was measured for it
    this.draw();
  }

  nearest(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - PAD.left) / Math.max(1, box.width - PAD.left - PAD.right);
    const wanted = this.first + share * (this.last - this.first);
    const all = this.series.flatMap((s) => s.x);
    return all.reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best), all[0] ?? 0);
  }

  draw() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight;
    this.plot.replaceChildren();
    if (!this.series.length || width < 40) return;
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`); // paper, which may be narrower, scales what was drawn
    this.plot.setAttribute("preserveAspectRatio", "xMinYMid meet");
    const xs = this.series.flatMap((s) => s.x).concat(this.spec.range || []);
    this.first = Math.min(...xs);
    this.last = Math.max(...xs, this.first + 1);
    const { share, ticks } = verticalScale(this.spec, this.series);
    const innerWidth = width - PAD.left - PAD.right, innerHeight = height - PAD.top - PAD.bottom;
    this.px = (x) => PAD.left + ((x - this.first) / (this.last - this.first)) * innerWidth;
    this.py = (y) => (y === null || share(y) === null || share(y) > 1.001 || share(y) < -0.001 ? null : PAD.top + (1 - share(y)) * innerHeight);
    this.axes(ticks, width, height);
    for (const s of this.series) this.line(s);
    this.marker = svg(this.plot, "line", { class: "marker", y1: PAD.top, y2: height - PAD.bottom, x1: 0, x2: 0 });
    this.mark(this.at);
  }

  axes(ticks, width, height) {
    for (const tick of ticks) {
      const y = this.py(tick);
      svg(this.plot, "line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y });
      svg(this.plot, "text", { x: PAD.left - 6, y: y + 4, "text-anchor": "end" }, words(tick));
    }
    if (this.spec.reference !== undefined) {
      const y = this.py(this.spec.reference);
      svg(this.plot, "line", { class: "reference", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y });
    }
    const across = niceSteps(this.first, this.last, width < 300 ? 3 : 5).filter((t) => Number.isInteger(t));
    for (const tick of across) {
      const anchor = this.px(tick) > width - 30 ? "end" : "middle";
      const x = anchor === "end" ? width - 2 : this.px(tick);
      svg(this.plot, "text", { x, y: height - 8, "text-anchor": anchor }, this.spec.xTick(tick));
    }
  }

  line(s) {
    const at = (list) => list.map((v, i) => (this.py(v) === null ? null : [this.px(s.x[i]), this.py(v)]));
    if (s.low && s.high) {
      // bands break where a side is missing; each whole stretch is one closed shape
      let stretch = [];
      const close = () => {
        if (stretch.length > 1) {
          const up = stretch.map((i) => [this.px(s.x[i]), this.py(s.high[i])]);
          const down = stretch.map((i) => [this.px(s.x[i]), this.py(s.low[i])]).reverse();
          svg(this.plot, "path", { class: `band k${s.index % 7}`, d: `${pathOf(up.concat(down))}Z` });
        }
        stretch = [];
      };
      s.x.forEach((_, i) => (this.py(s.low[i]) === null || this.py(s.high[i]) === null ? close() : stretch.push(i)));
      close();
    }
    if (s.faint) svg(this.plot, "path", { class: `line faint k${s.index % 7}`, d: pathOf(at(s.faint)) });
    svg(this.plot, "path", { ...look(s.index), d: pathOf(at(s.y)) });
    if (s.x.length <= 12) at(s.y).forEach((p) => p && svg(this.plot, "circle", { class: `k${s.index % 7}`, cx: p[0], cy: p[1], r: 2.2 }));
    const end = s.lost === null || s.lost === undefined ? -1 : s.x.indexOf(s.lost);
    if (end >= 0 && this.py(s.y[end]) !== null)
      svg(this.plot, "text", { class: "lost", x: this.px(s.lost), y: this.py(s.y[end]) + 5, "text-anchor": "middle" }, "✖");
    if (s.dots) {
      const every = Math.max(1, Math.ceil(s.x.length / 24));
      at(s.dots).forEach((p, i) => p && i % every === 0 && svg(this.plot, "circle", { class: `hollow k${s.index % 7}`, cx: p[0], cy: p[1], r: 2.6 }));
    }
  }

  // Put the marker at x and write every series' value there.
  mark(x) {
    this.at = x;
    if (!this.marker || !this.series.length) return;
    const at = x === null ? this.last : Math.min(Math.max(x, this.first), this.last);
    this.marker.setAttribute("x1", this.px(at));
    this.marker.setAttribute("x2", this.px(at));
    this.values.replaceChildren();
    html(this.values, "li", "at", this.spec.xName(at));
    for (const s of this.series) {
      const i = s.x.reduce((best, v, j) => (Math.abs(v - at) < Math.abs(s.x[best] - at) ? j : best), 0);
      const row = html(this.values, "li", "");
      drawKey(svg(row, "svg", { width: 28, height: 10, "aria-hidden": "true" }), s.index);
      html(row, "span", "name", breakable(s.name)).title = s.name;
      const range = s.low && s.high && s.low[i] !== null ? ` (${words(s.low[i])} … ${words(s.high[i])})` : "";
      const ended = at > s.x[i] && i === s.x.length - 1 ? `, ${this.spec.xName(s.x[i])}` : ""; // a shorter one's last
      html(row, "span", "number", words(s.y[i]) + range + ended);
      if (s.dots && s.dots[i] !== null) this.theory(s, i);
    }
  }

  theory(s, i) {
    const row = html(this.values, "li", "");
    const key = svg(row, "svg", { width: 28, height: 10, "aria-hidden": "true" });
    svg(key, "circle", { class: `hollow k${s.index % 7}`, cx: 14, cy: 5, r: 2.6 });
    html(row, "span", "name", "theory at the start");
    html(row, "span", "number", words(s.dots[i]));
  }
}
