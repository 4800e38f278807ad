// The page: which networks are shown, how deep the slider stands, and everything that follows from the two.

const data = JSON.parse(document.getElementById("data").textContent);
const MOST_AT_FIRST = 8;
const BANDS = 3; // more bands than this hide each other
const shown = new Set(data.networks.map((_, index) => index).slice(0, MOST_AT_FIRST));
const slider = document.getElementById("depth"), label = document.getElementById("depth-label"), play = document.getElementById("play");
const SPECS = [
  { title: "Likeness of locations", y: "cosine_mean", low: "cosine_low", high: "cosine_high", dots: "cosine_predicted",
    note: "Mean cosine between two locations; the band holds 90 % of pairs. At 1 all are the same.", include: [0, 1] },
  { title: "Size of a location", y: "norm_mean", low: "norm_min", high: "norm_max", dots: "norm_predicted",
    note: "Squared norm over the width: mean, and smallest to largest. It should stay near the dashed 1, unless the network has norm layers.", mayBeLog: true, reference: 1, floor: 0 },
  { title: "Effective rank", y: "effective_rank", note: "In how many directions locations differ. 1 is collapse.", mayBeLog: true, reference: 1, floor: 0 },
  { title: "Gradient", y: "gradient_mean", dots: "gradient_predicted",
    note: "Squared gradient norm here, relative to the output's. Far from the dashed 1, early blocks learn too slowly or blow up.", mayBeLog: true, reference: 1, floor: 0 },
  { title: "What a block carries on", y: "carry", note: "Cosine between a location before and after the block. A single block near 0 among others near 1 has lost its shortcut.", include: [0, 1] },
  { title: "Largest entry", y: "outlier", note: "Over the root mean square. A jump is a channel or a location that outgrows all others.", mayBeLog: true, floor: 0 },
  { title: "Spread of attention", y: "attention_spread", note: "Entropy of the attention weights over that of equal weights: 0 looks at one location, 1 at all alike.", include: [0, 1] },
];
let depths = [0], charts = [], kernels = [], timer = null;

function block() { return depths[Number(slider.value)] ?? 0; }

function setBlock(wanted) {
  const target = Math.min(wanted, depths[depths.length - 1]);
  slider.value = depths.reduce((a, b, i) => (Math.abs(b - target) < Math.abs(depths[a] - target) ? i : a), 0);
  refresh();
}

function refresh() {
  const now = block();
  label.textContent = now === 0 ? "input" : `after block ${now}`;
  slider.setAttribute("aria-valuetext", label.textContent);
  kernels.forEach((kernel) => kernel.show(now));
  charts.forEach((chart) => chart.mark(now));
}

function seriesOf(spec) {
  return [...shown].sort((a, b) => a - b).filter((i) => data.networks[i].columns[spec.y]).map((index) => {
    const { columns, blocks, name, lost } = data.networks[index];
    const banded = shown.size <= BANDS && columns[spec.low] && columns[spec.high];
    return { index, name, lost, x: blocks, y: columns[spec.y], low: banded ? columns[spec.low] : null, high: banded ? columns[spec.high] : null, dots: columns[spec.dots] };
  });
}

// After a change of networks: the slider's stops, one canvas each, one line each.
function rebuild() {
  const before = block(), networks = [...shown].sort((a, b) => a - b).map((i) => data.networks[i]);
  const withKernels = networks.filter((n) => n.kernels);
  const drawn = withKernels.length === networks.length;
  const stops = new Set(networks.flatMap((n) => (drawn ? [...n.kernels.blocks, ...past(n)] : n.blocks)));
  depths = [...stops].sort((a, b) => a - b);
  if (!depths.length) depths = [0];
  slider.max = depths.length - 1;
  const holder = document.getElementById("kernels");
  holder.replaceChildren();
  holder.dataset.count = withKernels.length;
  kernels = withKernels.map((network) => new Kernel(holder, network));
  document.getElementById("kernel-note").textContent = kernelNote(withKernels);
  charts.forEach((chart) => chart.show(seriesOf(chart.spec)));
  setBlock(before);
}

// Blocks behind the last kernel: what they give is zero or not finite.
const past = (network) => network.blocks.filter((block) => block > network.kernels.blocks.at(-1));

function kernelNote(networks) {
  const notes = [];
  for (const network of networks.filter((n) => past(n).length)) {
    const last = network.kernels.blocks.at(-1);
    notes.push(`${network.name} has no kernel from block ${past(network)[0]} on: what blocks give there is zero or not finite. The last one, of block ${last}, is shown.`);
  }
  if (networks.some((n) => n.kernels.blocks.length + past(n).length < n.blocks.length)) notes.push("Not every block's kernel was kept; the nearest shallower one is shown.");
  const stride = Math.max(1, ...networks.map((n) => n.kernels.stride));
  if (stride > 1) notes.push(`To keep the file small, one location in ${stride} is shown of long sequences.`);
  return notes.join(" ");
}

function stop() {
  clearInterval(timer);
  timer = null;
  play.textContent = "▶ Play";
  play.setAttribute("aria-pressed", "false");
}

function start() {
  if (Number(slider.value) >= Number(slider.max)) slider.value = 0;
  play.textContent = "❚❚ Pause";
  play.setAttribute("aria-pressed", "true");
  refresh();
  timer = setInterval(() => {
    if (Number(slider.value) >= Number(slider.max)) return stop();
    slider.value = Number(slider.value) + 1;
    refresh();
  }, Math.min(400, Math.max(90, 6000 / depths.length)));
}

function networkCharts() {
  const holder = document.getElementById("charts");
  const deepest = Math.max(...data.networks.flatMap((n) => n.blocks));
  for (const spec of SPECS) {
    if (!data.networks.some((n) => n.columns[spec.y])) continue;
    const pointer = {
      onPoint: (x) => charts.forEach((chart) => chart.mark(x === null ? block() : x)),
      onPick: (x) => { stop(); setBlock(x); },
      xName: (x) => (x === 0 ? "input" : `after block ${x}${x === deepest ? " (the last)" : ""}`),
      xTick: (x) => (x === 0 ? "input" : words(x)),
    };
    charts.push(new Chart(holder, { ...spec, ...pointer }));
  }
  holder.classList.toggle("three", charts.length !== 4);
}

function curveSeries(line, faint) {
  return data.curves.flatMap((curve, index) => {
    const name = [line, faint].find((n) => curve[n]);
    if (!name) return [];
    const [x, y] = curve[name];
    const raw = name === line && curve[faint] && curve[faint][1].length === y.length ? curve[faint][1] : null;
    return [{ index, name: curve.name, x, y, faint: raw }];
  });
}

// What a loss is of: runs of images log their accuracy.
function unit() {
  const images = data.curves.filter((curve) => curve.valid_accuracy).length;
  return images === 0 ? "token" : images === data.curves.length ? "image" : "token, or per image";
}

function lossNote(series) {
  const faint = series.some((one) => one.faint) ? "; faint: as logged" : "";
  return `Cross-entropy in nats per ${unit()}, smoothed${faint}.`;
}

function trainingCharts() {
  const holder = document.getElementById("curve-charts");
  const losses = curveSeries("ema", "loss");
  const unlessDiverged = { mayBeLog: true, logAbove: 100 }; // a run that blew up would press all others flat
  const specs = [
    { title: "Training loss", note: lossNote(losses), series: losses, settle: true, ...unlessDiverged },
    { title: "Validation loss", note: "On data the network is not trained on.", series: curveSeries("valid_loss"), fewest: 2, ...unlessDiverged },
    { title: "Validation accuracy", note: "The share of held-out images whose class is named right.", series: curveSeries("valid_accuracy"), fewest: 2, include: [0, 1] },
    { title: "Gradient norm", note: "Of all parameters together, before clipping.", series: curveSeries("gradient"), mayBeLog: true, floor: 0 },
  ];
  const range = [0, Math.max(...specs.flatMap((s) => s.series.flatMap((one) => one.x)))];
  for (const { series, fewest = 1, ...spec } of specs) {
    if (!series.some((one) => one.x.length >= fewest)) continue;
    const chart = new Chart(holder, {
      ...spec, range, onPoint: (x) => chart.mark(x), onPick: (x) => chart.mark(x), xName: (x) => `step ${x}`, xTick: (x) => words(x),
    });
    chart.show(series);
  }
  const count = holder.children.length;
  if (count < 4) holder.classList.add(count > 2 ? "three" : "two"); // four stand in one row
}

function toggles() {
  for (const box of document.querySelectorAll("[data-network]")) {
    const index = Number(box.dataset.network);
    box.checked = shown.has(index);
    if (data.networks.length === 1) box.parentElement.hidden = true;
    box.addEventListener("change", () => {
      if (box.checked) shown.add(index);
      else shown.delete(index);
      rebuild();
    });
  }
  for (const key of document.querySelectorAll("[data-key]")) drawKey(key, Number(key.dataset.key));
}

if (data.networks.length) {
  toggles();
  networkCharts();
  rebuild();
  slider.addEventListener("input", () => { stop(); refresh(); });
  play.addEventListener("click", () => (timer === null ? start() : stop()));
  const linked = /^#block=(\d+)$/.exec(location.hash); // a link may name the depth: report.html#block=12
  const lost = data.networks.find((network) => network.lost !== null);
  setBlock(linked ? Number(linked[1]) : lost ? lost.lost : Infinity);
}
if (data.curves.length) trainingCharts();

let closed = [];
window.addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((node) => { node.open = true; });
});
window.addEventListener("afterprint", () => closed.forEach((node) => { node.open = false; }));
document.body.dataset.ready = "true";
