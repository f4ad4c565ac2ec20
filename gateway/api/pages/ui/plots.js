// Plots of the last five minutes: sequences, and blocks by state. Drawn by uPlot (uplot.min.js, MIT licence).

import { byId, make } from "./dom.js";

const SAMPLES = 300;
const LEAST_S = 60;
const HEIGHT = 150;
const PLOTS = [
  { title: "Sequences", series: { running: "decode", waiting: "decode-queue", "swapped out": "swapped" } },
  { title: "Blocks in use", series: { sealed: "sealed", reserved: "reserved", cached: "cached", quarantine: "quarantine" } },
];

let shown = [];
const history = { times: [], values: [] };

// Draws empty plots. They are redrawn when the colours change between light and dark.
export function startPlots() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  dark.addEventListener("change", draw);
  new ResizeObserver(() => shown.forEach((plot) => plot.setSize(size()))).observe(byId("plots"));
  draw();
}

// Adds a sample: the sums over all decode workers and over all arenas.
export function addSample({ workers, arenas }) {
  const sum = (records, number) => records.reduce((total, record) => total + number(record), 0);
  const decode = workers.filter((worker) => worker.role === "decode");
  const sequences = ["num_running", "num_waiting", "num_preempted"].map((name) => sum(decode, (worker) => worker[name]));
  const blocks = Object.keys(PLOTS[1].series).map((state) => sum(arenas, (arena) => arena.counts[state]));
  history.times.push(Date.now() / 1000);
  history.values.push([sequences, blocks]);
  if (history.times.length > SAMPLES) {
    history.times.shift();
    history.values.shift();
  }
  shown.forEach((plot, index) => plot.setData(data(index)));
}

// Returns what uPlot takes: the times, then the values of each series.
function data(index) {
  const names = Object.keys(PLOTS[index].series);
  return [history.times, ...names.map((_, series) => history.values.map((sample) => sample[index][series]))];
}

function size() {
  return { width: byId("plots").querySelector(".plot")?.clientWidth ?? 300, height: HEIGHT };
}

function draw() {
  shown.forEach((plot) => plot.destroy());
  const frames = PLOTS.map(() => make("div", { className: "plot" }));
  const figures = PLOTS.map(({ title }, index) => make("figure", {}, make("figcaption", {}, title), frames[index]));
  byId("plots").replaceChildren(...figures);
  shown = PLOTS.map((_, index) => new window.uPlot(options(index), data(index), frames[index]));
}

function options(index) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  const axis = { stroke: colour("soft"), grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1 } };
  const series = Object.entries(PLOTS[index].series).map(([label, name]) =>
    ({ label, stroke: colour(name), width: 2, points: { show: false } }));
  return {
    ...size(),
    scales: {
      x: { range: (_, first, last) => [Math.min(first, last - LEAST_S), last] },
      y: { range: (_, low, high) => [0, Math.max(high, 1)] },
    },
    axes: [axis, { ...axis, size: 56, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] }],
    series: [{ value: "{HH}:{mm}:{ss}" }, ...series],
  };
}
