// The page of `diloco watch`. Data of a run may come from an untrusted peer, so it is shown as text, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const state = { data: null, tag: "", run: 0, axis: "step", log: false, cell: null };
const NO_DATA = "No data";

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const fill = (node, ...children) => node.replaceChildren(...children);

// Formatting of quantities, similar to diloco.units.

function scaled(value, units) {
  let index = 0;
  while (Math.abs(value) >= 999.5 && index < units.length - 1) { value /= 1000; index += 1; }
  return value.toFixed(index && Math.abs(value) < 99.95 ? 1 : 0) + units[index];
}
const count = (value) => scaled(value, ["", "K", "M", "B", "T"]);
const bytes = (value) => scaled(value, [" B", " kB", " MB", " GB", " TB", " PB"]);
const whole = (value) => value.toLocaleString("en");
const percent = (value) => `${(100 * value).toFixed(1)} %`;
const loss = (value) => value.toFixed(4);
const short = (value) => String(Number(value.toPrecision(3)));
const FORMATS = { "nats per token": loss, share: percent, tokens: count, bytes };
function duration(seconds) {
  if (seconds > 0 && seconds < 0.0009995) return `${Math.round(1e6 * seconds)} us`;
  if (seconds < 0.9995) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const all = Math.round(seconds);
  if (all < 60) return `${all} s`;
  if (all < 3600) return `${Math.floor(all / 60)} min ${all % 60} s`;
  if (all < 86400) return `${Math.floor(all / 3600)} h ${Math.floor((all % 3600) / 60)} min`;
  return `${Math.floor(all / 86400)} d ${Math.floor((all % 86400) / 3600)} h`;
}
const known = (value) => value !== null && value !== undefined && value !== "";
const part = (done, all) => `${Math.floor((100 * done) / Math.max(1, all))} %`;  // rounded down, so that 100 % means complete
const fetched = (of) => `${part(of.received_bytes, of.expected_bytes)} of ${bytes(of.expected_bytes)}; `
  + `fragment ${of.fragment}: ${part(of.fragment_received_bytes, of.fragment_expected_bytes)}`;
const shown = (value, format = String) => (known(value) ? format(value) : NO_DATA);

const current = () => state.data.runs[state.run] || state.data.runs[0];

let waiting = false;
function changed() {
  if (waiting) return;
  waiting = true;
  setTimeout(() => { waiting = false; if (state.data && state.data.runs) render(); }, 100);
}

// Curves.

const AXES = {  // how an axis shows a unit
  share: { tickformat: ".0%", hoverformat: ".1%" },
  bytes: { tickformat: "~s", ticksuffix: "B" },
};

const MARKED = ["Evaluated", "CheckpointSaved"];  // events with few points, each of which has a mark

function figuresOf(...kinds) {  // a figure for each metric of these events, in order; held-out losses are in that of the loss
  const of = (kind) => state.data.metrics.filter((metric) => metric.event === kind && metric.name !== "tokens");
  const isLoss = (metric) => metric.unit === "nats per token";
  return kinds.flatMap((kind) => of(kind).filter((metric) => kind !== "Evaluated" || !isLoss(metric)).map((metric) => ({
    ...metric, log: metric.of_model && metric.unit !== "cosine", beside: metric.name === "loss" ? of("Evaluated").filter(isLoss) : [],
  })));
}

// plotly interprets some tags and entities in its texts
const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function curves() {
  const found = [];
  const runs = state.data.runs;
  runs.forEach((run, runNumber) => {
    Object.entries(run.lines).forEach(([process, line], number) => {
      const name = [runs.length > 1 || !process ? run.name : "", process].filter(Boolean).join(", ");
      const index = runs.length > 1 ? runNumber : number;
      const lines = Object.fromEntries(Object.entries(line).map(([kind, of]) => [kind, MARKED.includes(kind) ? of : { ...of, rows: withGaps(of.rows) }]));
      found.push({ name, lines, colour: `--c${index % 8}`, dash: runs.length > 1 && number ? "dot" : "solid" });
    });
  });
  return found;
}

function timeScale(all) {
  if (state.axis !== "time_s") return [1, state.axis === "step" ? "steps" : "tokens"];
  const longest = Math.max(0, ...all.map(({ lines: { StepFinished: { rows } } }) => (rows.length ? rows[rows.length - 1][2] : 0)));
  return longest > 7200 ? [3600, "hours"] : longest > 120 ? [60, "minutes"] : [1, "seconds"];
}

function withGaps(table) {  // insert an empty point wherever a replica was absent, so that no line is drawn across
  const steps = table.map((row, index) => (index ? row[0] - table[index - 1][0] : 0)).slice(1);
  const usual = [...steps].sort((a, b) => a - b)[Math.floor(steps.length / 2)];
  return table.flatMap((row, index) => (index && steps[index - 1] > 10 * usual
    ? [row.map((value, column) => (column < 3 ? value : null)), row] : [row]));
}

function segments(table, column) {  // split the rows at gaps, because a band would be filled across them
  const found = [[]];
  for (const row of table) {
    if (row[column] === null) found.push([]);
    else found[found.length - 1].push(row);
  }
  return found.filter((segment) => segment.length);
}

function trace(metric, of, divisor) {  // the curve of one metric and process, with a band of its extremes
  const { columns, stride, rows } = of.lines[metric.event], drawn = [];
  const place = columns.indexOf(state.axis), column = columns.indexOf(metric.name);
  const marked = MARKED.includes(metric.event);
  const x = rows.map((row) => row[place] / divisor), y = rows.map((row) => row[column]);
  if (y.every((value) => value === null)) return [];
  if (metric.of_model && stride > 1) {
    for (const segment of segments(rows, column)) {
      const side = (offset) => ({
        x: segment.map((row) => row[place] / divisor), y: segment.map((row) => row[column + offset]),
        mode: "lines", line: { width: 0 }, hoverinfo: "skip",
      });
      drawn.push(side(1), { ...side(2), fill: "tonexty", fillcolor: colour(of.colour) + "2e" });
    }
  }
  const line = { color: colour(of.colour), width: marked ? 1 : 1.6, dash: marked ? "dot" : of.dash };
  const look = marked ? { mode: "lines+markers", marker: { size: 5, color: line.color } } : { mode: "lines" };
  drawn.push({ x, y, name: plain(of.name), line, ...look });
  return drawn;
}

function traces(figure, all, divisor) {
  const named = (metric, of) => trace(metric, figure.beside.length ? { ...of, name: `${of.name} ${metric.title.toLowerCase()}` } : of, divisor);
  return all.flatMap((of) => [figure, ...figure.beside].flatMap((metric) => named(metric, of)));
}

function describe(figure, drawn, unit) {
  const parts = drawn.filter((each) => each.name).slice(0, 8).map((each) => {
    const values = each.y.map((value, index) => [value, each.x[index]]).filter(([value]) => value !== null);
    if (!values.length) return "";
    const [first, from] = values[0], [last, to] = values[values.length - 1];
    return `${each.name}: ${short(first)} at ${short(from)}, ${short(last)} at ${short(to)} ${unit}`;
  });
  return parts.length ? `${figure.title} (${figure.unit || "no unit"}). ${parts.filter(Boolean).join("; ")}.` : `${figure.title}: no data`;
}

function draw(holder, figures, all, divisor, unit) {
  for (const figure of figures) {
    let box = $(`figure-${figure.name}`);
    if (!box) {
      const title = make("h3", {}, figure.title + (figure.unit ? ` (${figure.unit})` : ""));
      box = make("figure", { id: `figure-${figure.name}` }, make("figcaption", {}, title), make("div", { class: "plot", role: "img" }));
      holder.append(box);
    }
    const plot = box.querySelector(".plot"), drawn = traces(figure, all, divisor);
    box.hidden = !drawn.length;
    plot.setAttribute("aria-label", describe(figure, drawn, unit));
    if (!drawn.length || !window.Plotly) continue;
    if (!plot.data) fill(plot);
    const axis = { gridcolor: colour("--line"), zeroline: false, linecolor: colour("--line") };
    const layout = {
      margin: { l: 40, r: 10, t: 30, b: 38 }, showlegend: false, hovermode: "x unified", uirevision: state.axis,
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: colour("--ink"), size: 12 },
      hoverlabel: { namelength: 60, bgcolor: colour("--panel"), font: { color: colour("--ink") } },
      xaxis: { ...axis, title: { text: unit, font: { size: 12 } } },
      yaxis: { ...axis, ...AXES[figure.unit], automargin: true, type: state.log && figure.log ? "log" : "linear", rangemode: "normal" },
    };
    const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };
    window.Plotly.react(plot, drawn, layout, config);
  }
}

function renderCurves() {
  const all = curves(), [divisor, unit] = timeScale(all);
  fill($("legend"), ...all.map((each) => {
    const mark = make("i");
    mark.style.borderTopColor = colour(each.colour);
    mark.style.borderTopStyle = each.dash === "dot" ? "dotted" : "solid";
    return make("li", {}, mark, each.name);
  }));
  const has = (...kinds) => all.some((of) => kinds.some((kind) => of.lines[kind].rows.length));
  $("curves-section").hidden = !has("StepFinished", "Evaluated", "CheckpointSaved");
  const undrawn = state.data.runs.reduce((sum, run) => sum + run.undrawn, 0);
  fill($("undrawn"), undrawn ? `The curves of ${undrawn} more processes are not drawn; the table of peers lists them.` : "");
  draw($("curves"), figuresOf("StepFinished", "Evaluated", "CheckpointSaved"), all, divisor, unit);
  $("outer-section").hidden = !has("RoundCommitted");
  if ($("outer-details").open) draw($("outer"), figuresOf("RoundCommitted"), all, divisor, unit);
}

// The other sections, which show one run.

function renderNow(run) {
  const head = run.header;
  fill($("where"), `${run.name}: ${shown(head.algorithm)}, ${shown(head.replicas, (n) => `${n} replica${n === 1 ? "" : "s"}`)}, `
    + `${shown(head.parameters, (n) => `${count(n)} parameters`)}; ${run.where}`);
  const behind = run.behind_bytes > 1048576 ? [`Still reading; ${bytes(run.behind_bytes)} of records are left.`] : [];
  fill($("problems"), ...[...behind, ...run.problems].map((words) => make("p", {}, words)));
  const done = known(head.step) && head.total_steps ? head.step / head.total_steps : 0;
  const bar = $("bar");
  bar.setAttribute("aria-valuemax", head.total_steps || 1);
  bar.setAttribute("aria-valuenow", head.step || 0);
  bar.firstElementChild.style.width = `${100 * Math.min(1, done)}%`;
  const saved = known(head.data_parallel_bytes) && head.sent_bytes > 0 ? head.data_parallel_bytes / head.sent_bytes : null;
  const tiles = [
    ["State", head.state, head.fetched ? fetched(head.fetched) : ""],
    ["Step", shown(head.step, whole), known(head.total_steps) ? `of ${whole(head.total_steps)}` : ""],
    ["Time left", head.state === "finished" ? "none" : shown(head.left_s, duration), known(head.elapsed_s) ? `${duration(head.elapsed_s)} so far` : ""],
    ["Tokens", shown(head.tokens, count), known(head.tokens_per_s) ? `${count(head.tokens_per_s)} per second` : ""],
    ["Loss", shown(head.loss, loss), "training"],
    ["Held-out loss", shown(head.heldout_loss, loss), known(head.sites_loss)
      ? `all own data ${loss(head.sites_loss)}` : known(head.best_heldout_loss) ? `best ${loss(head.best_heldout_loss)}` : ""],
    ["Compute utilisation", shown(head.compute_utilization, percent), known(head.model_flops_utilization) ? `MFU ${percent(head.model_flops_utilization)}` : ""],
    ["Sent by one replica", shown(head.sent_bytes, bytes), known(saved)
      ? `data-parallel: ${bytes(head.data_parallel_bytes)}, ${saved >= 1 ? `${short(saved)}x as much` : `${short(1 / saved)}x less`}` : ""],
    ["Rounds", shown(head.rounds_committed, (n) => `${whole(n)} merged`), known(head.rounds_void) ? `${whole(head.rounds_void)} void` : ""],
  ];
  fill($("numbers"), ...tiles.filter(([, value]) => value !== NO_DATA).map(([name, value, small]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, value, small ? make("small", {}, small) : null))));
  document.title = `${head.state === "running" ? "" : `${head.state}: `}${run.name}${known(head.step) ? `, step ${head.step}` : ""} - diloco watch`;
}

function renderAlerts() {
  const runs = state.data.runs;
  const found = runs.flatMap((run) => run.alerts.map((alert) => [run, alert]));
  const items = found.map(([run, alert]) => make("li", { class: alert.level },
    make("strong", {}, alert.level === "error" ? "Error" : "Warning"), runs.length > 1 ? `${run.name}: ` : "",
    `${alert.who[0].toUpperCase()}${alert.who.slice(1)} ${alert.words}`, known(alert.step) ? ` (step ${whole(alert.step)})` : ""));
  const key = JSON.stringify(found.map(([run, alert]) => [run.name, alert]));
  if ($("alerts").dataset.key === key) return;  // unchanged alerts must not be announced again
  $("alerts").dataset.key = key;
  fill($("alerts"), items.length ? make("ul", {}, ...items) : make("p", { class: "quiet" }, "None."));
}

const COLUMNS = [
  ["replica", "replica", String],
  ["name", "name", String],
  ["state", "state", String],
  ["fetched", "state fetched", fetched],
  ["step", "step", whole],
  ["way", "route", String],
  ["heard_s", "last answer", (value) => `${duration(value)} ago`],
  ["round_trip_s", "round trip", duration],
  ["sent_bytes", "sent", bytes],
  ["received_bytes", "received", bytes],
  ["link_bits_per_s", "link", (value) => scaled(value, [" bit/s", " kbit/s", " Mbit/s", " Gbit/s", " Tbit/s"])],
  ["steps_per_s", "steps/s", short],
  ["pace", "pace", percent],
  ["weight", "weight", short],
  ["late_s", "late by", duration],
  ["wait_s", "waited", duration],
  ["counted", "in the mean", String],
  ["missed", "missed in a row", whole],
  ["digest", "digest", String],
  ["codec", "codec", String],
  ["peer", "peer", String],
];
const BAD = { state: ["no answer", "refuses", "interrupted"], digest: ["differs"] }, SOME = { state: ["gone", "joining", "it is starting"] };

function renderPeers(run) {
  const peers = run.peers, missed = run.alerts.filter((alert) => alert.kind === "missed").map((alert) => alert.who);
  const measured = state.data.metrics.filter((metric) => metric.event === "Site")
    .map((metric) => [metric.name, metric.title.toLowerCase(), FORMATS[metric.unit] || short]);
  const used = [...COLUMNS, ...measured].filter(([key]) => peers.some((peer) => known(peer[key])));
  $("peers-section").hidden = !peers.length;
  const head = make("tr", {}, ...used.map(([, title]) => make("th", { scope: "col" }, title)));
  const body = peers.map((peer) => make("tr", {}, ...used.map(([key, , format], index) => {
    const value = peer[key], late = key === "missed" && missed.includes(`replica ${peer.replica}`);
    const kind = !known(value) ? "none" : (BAD[key] || []).includes(value) ? "bad" : late || (SOME[key] || []).includes(value) ? "some" : null;
    return make(index ? "td" : "th", { class: kind, scope: index ? null : "row" }, shown(value, format));
  })));
  fill($("peers"), make("thead", {}, head), make("tbody", {}, ...body));
}

const listed = (replicas) => (replicas.length > 12 ? `${replicas.slice(0, 12).join(", ")} and ${replicas.length - 12} more` : replicas.join(", ") || "none");

function roundWords(fragment, outerStep, cell) {
  if (!cell) return `Fragment ${fragment}, outer step ${outerStep}: ${NO_DATA}.`;
  return [
    `Fragment ${fragment}, outer step ${outerStep}, at step ${whole(cell.step)}: ${cell.state}.`,
    `Sent by: ${listed(cell.sent)}.`,
    cell.state === "merged" ? `In the mean: ${listed(cell.contributors)}. Applied by: ${listed(cell.merged)}.` : "",
    cell.absent.length ? `Not in the mean: ${listed(cell.absent)}.` : "",
    cell.clipped.length ? `Clipped: ${listed(cell.clipped)}.` : "",
    cell.differ.length ? `Different digest: ${listed(cell.differ)}.` : "",
    known(cell.last) ? `Last to arrive: replica ${cell.last}, ${duration(cell.last_after_s)} after the first.` : "",
    known(cell.wait_s) ? `Longest wait: ${duration(cell.wait_s)}.` : "",
    cell.why ? `Reason: ${cell.why}` : "",
  ].filter(Boolean).join(" ");
}

function renderGrid(run) {
  const { fragments, cells } = run.grid;
  $("grid-section").hidden = !fragments.length;
  if (!fragments.length) return;
  const steps = [...new Set(Object.keys(cells).map((key) => Number(key.split(":")[1])))].sort((a, b) => a - b).slice(-64);
  const kept = state.cell && cells[state.cell] ? state.cell : `${fragments[0]}:${steps[steps.length - 1]}`;
  fill($("grid"), ...fragments.map((fragment) => make("tr", {}, make("th", { scope: "row" }, `fragment ${fragment}`), ...steps.map((outerStep) => {
    const key = `${fragment}:${outerStep}`, cell = cells[key];
    const kind = !cell ? null : cell.absent.length ? "partial" : cell.state;
    const words = roundWords(fragment, outerStep, cell);
    return make("td", { class: kind, "data-key": key, tabindex: key === kept ? "0" : "-1", "aria-label": words });
  }))));
}

function pointAt(cell) {
  if (!cell || !cell.dataset.key) return;
  state.cell = cell.dataset.key;
  fill($("round"), cell.getAttribute("aria-label"));
}

function moveInGrid(event) {
  const cell = event.target, move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (!move || !cell.dataset.key) return;
  const row = $("grid").rows[cell.parentNode.rowIndex + move[0]];
  const next = row && row.cells[cell.cellIndex + move[1]];
  if (!next || !next.dataset.key) return;
  event.preventDefault();
  cell.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function renderViews(run) {
  $("views-section").hidden = !run.views.length;
  if (!run.views.length) return;
  const last = Math.max(run.header.step || 0, ...run.views.map((view) => view.step)) || 1;
  const lanes = new Map();
  const first = run.views[0], before = first.members.filter((m) => !first.joined.includes(m)).concat(first.left);
  const spans = [{ step: 0, members: before }, ...run.views];
  spans.forEach((view, index) => {
    const end = index + 1 < spans.length ? spans[index + 1].step : last;
    for (const member of view.members) lanes.set(member, [...(lanes.get(member) || []), [view.step, end]]);
  });
  const drawn = [...lanes.keys()].sort((a, b) => a - b).map((member) => {
    const bars = lanes.get(member).map(([from, to]) => {
      const bar = make("i");
      bar.style.left = `${(100 * from) / last}%`;
      bar.style.width = `${(100 * (to - from)) / last}%`;
      return bar;
    });
    const words = `replica ${member}: ${lanes.get(member).map(([from, to]) => `steps ${from} to ${to}`).join(", ")}`;
    return make("div", { class: "lane", role: "img", "aria-label": words, title: words }, make("span", {}, `replica ${member}`), make("div", {}, ...bars));
  });
  const told = [...run.views].reverse().map((view) => make("li", {}, `Step ${whole(view.step)}, view ${shown(view.view)}: ${view.members.length} members`
    + (view.joined.length ? `; ${listed(view.joined)} joined` : "") + (view.left.length ? `; ${listed(view.left)} left` : "") + `. ${view.reason}`));
  fill($("views"), ...drawn, make("ol", { class: "views-list", reversed: true, tabindex: "0" }, ...told));
}

function renderWords(run) {
  const samples = [...run.samples].reverse().map((sample) => make("article", {},
    make("h3", {}, `Step ${whole(sample.step)}`), make("pre", {}, make("b", {}, sample.prompt), sample.text)));
  $("samples-section").hidden = !samples.length;
  fill($("samples"), ...samples);
  const notes = [...run.notes].reverse().map((note) => make("li", {}, `Step ${whole(note.step)}: ${note.text}`));
  fill($("notes"), ...(notes.length ? [make("ul", { class: "views-list", tabindex: "0" }, ...notes)] : []));
  $("facts").parentNode.hidden = !Object.keys(run.facts).length;
  $("facts-section").hidden = $("facts").parentNode.hidden && !notes.length;
  fill($("facts"), ...Object.entries(run.facts).flatMap(([name, words]) => [make("dt", {}, name), make("dd", {}, words)]));
}

const LOCAL = /^(out$|monitor\.|(network|swarm)\.(identity|listen|announce|name))/;  // settings that don't affect training

function renderSettings() {
  const { runs } = state.data, filled = runs.filter((run) => Object.keys(run.settings).length);
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))].filter((key) => !LOCAL.test(key)).sort();
  const settings = keys.filter((key) => new Set(filled.map((run) => run.settings[key])).size > 1)
    .map((key) => [key, runs.map((run) => run.settings[key])]);
  $("settings-section").hidden = runs.length < 2;
  const head = make("tr", {}, make("th", { scope: "col" }, "setting"), ...runs.map((run) => make("th", { scope: "col" }, run.name)));
  const body = settings.map(([key, values]) => make("tr", {}, make("th", { scope: "row" }, key), ...values.map((value) => make("td", {}, value || NO_DATA))));
  fill($("settings"), make("thead", {}, head), make("tbody", {}, ...body));
}

function renderPicker() {
  const { runs } = state.data, select = $("run");
  $("picker").hidden = runs.length < 2;
  const key = JSON.stringify(runs.map((run) => run.name));
  if (select.dataset.key === key) return;
  select.dataset.key = key;
  fill(select, ...runs.map((run, number) => make("option", { value: number, selected: number === state.run }, run.name)));
}

function render() {
  const run = current();
  if (!run) return;
  renderPicker();
  renderNow(run);
  renderAlerts();
  renderSettings();
  renderPeers(run);
  renderGrid(run);
  renderViews(run);
  renderWords(run);
  renderCurves();
  for (const box of document.querySelectorAll(".wide")) box.previousElementSibling.hidden = box.scrollWidth <= box.clientWidth;
}

function say(words) {  // a text that stays must not be announced again
  if ($("live").textContent !== words) fill($("live"), words);
}

async function follow() {
  try {
    const answer = await fetch("data.json", { headers: { "If-None-Match": state.tag }, signal: AbortSignal.timeout(30000) });
    if (answer.status === 200) {
      state.data = await answer.json();
      state.tag = answer.headers.get("ETag");  // of data that have arrived
      changed();
    }
    // a started server does not know the cookie of the last one
    say(answer.status === 403 ? "Connection lost. Open the address that diloco watch has printed; this page then continues." : "live");
  } catch {
    say("Connection lost; reconnecting.");
  }
  setTimeout(follow, 1000);
}

const darkSystem = window.matchMedia("(prefers-color-scheme: dark)");
function applyTheme() {
  document.documentElement.dataset.theme = $("theme").value || (darkSystem.matches ? "dark" : "light");
  if (state.data && state.data.runs) render();
}

function start() {
  darkSystem.addEventListener("change", applyTheme);
  $("theme").addEventListener("change", applyTheme);
  $("run").addEventListener("change", (event) => { state.run = Number(event.target.value); state.cell = null; render(); });
  $("controls").addEventListener("change", (event) => {
    if (event.target.name === "axis") state.axis = event.target.value;
    else state.log = event.target.checked;
    renderCurves();
  });
  $("outer-details").addEventListener("toggle", renderCurves);
  $("grid").addEventListener("mouseover", (event) => pointAt(event.target));
  $("grid").addEventListener("focusin", (event) => pointAt(event.target));
  $("grid").addEventListener("keydown", moveInGrid);
  document.addEventListener("DOMContentLoaded", changed);  // plotly is loaded by then
  const exported = $("data");
  if (exported) {
    state.data = JSON.parse(exported.textContent);
    fill($("live"), `as of ${new Date(1000 * state.data.made_s).toLocaleString()}`);
  } else follow();
  applyTheme();
}

start();
