"use strict";

// The table of episodes, and the episodes that are opened from it.
//
// `paw report` embeds rows and episodes in its page. `paw view` embeds neither: live.js adds rows as
// they are written, and an episode is fetched when it is opened. All text is set as text, never as
// HTML.

const ROWS_AT_ONCE = 50;
const ENTROPY_SCALE = 2; // nats that have the full colour
const ADVANTAGE_SCALE = 2;

const MODES = {
  probability: {
    label: "Probability",
    meaning: "How likely the model thought each token: its own, and those of the observation.",
    legend: [["p 1", 0, "heat"], ["0.75", 0.25, "heat"], ["0.5", 0.5, "heat"], ["0", 1, "heat"]],
  },
  entropy: {
    label: "Entropy",
    meaning: "How uncertain the policy was at each token it sampled, in nats.",
    legend: [["0", 0, "heat"], ["0.5", 0.25, "heat"], ["1", 0.5, "heat"], ["2 and more", 1, "heat"]],
  },
  advantage: {
    label: "Advantage",
    meaning: "What the policy loss weighted each sampled token with. Evaluations have none.",
    legend: [["−2", 1, "heat"], ["−1", 0.5, "heat"], ["0", 0, "calm"], ["1", 0.5, "calm"], ["2", 1, "calm"]],
  },
  mask: {
    label: "World model",
    meaning: "Where the world-model loss acts.",
    legend: [["learnt from", 1, "kept"], ["masked", 0, "masked"]],
  },
};

const page = JSON.parse(document.getElementById("episode-data").textContent);
const severalRuns = page.runs.length > 1;
const state = {
  filter: { split: "", run: "", from: "", to: "", won: "", least: "", text: "" },
  sort: "step",
  ascending: false,
  shown: ROWS_AT_ONCE,
  mode: "probability",
  open: null, // {run, row}
  beside: null, // {run, row}, of the same task
  opener: null, // the button that opened the episode
  request: 0, // counts the episodes asked for, so that a late answer is dropped
};
const parts = {}; // elements that are drawn again

// --- elements

/** Make an element. Children are elements or text; null ones are left out. */
function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

function badge(text, look) {
  return make("span", { class: `badge ${look}` }, text);
}

function number(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : "–";
}

function updateName(step) {
  return step ? `Update ${step}` : "Before training";
}

// --- table

function allRows() {
  const rows = [];
  page.runs.forEach((run, index) => {
    for (const row of run.rows) rows.push({ run: index, row });
  });
  return rows;
}

function matches({ run, row }) {
  const { split, run: chosen, from, to, won, least, text } = state.filter;
  if (split && row.split !== split) return false;
  if (chosen !== "" && run !== Number(chosen)) return false;
  if (from !== "" && row.step < Number(from)) return false;
  if (to !== "" && row.step > Number(to)) return false;
  if (won !== "" && row.won !== (won === "yes")) return false;
  if (least !== "" && !(typeof row.return === "number" && row.return >= Number(least))) return false;
  if (!text) return true;
  const searched = `${row.task}\n${row.kind}\n${row.actions}`.toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => searched.includes(word));
}

function compareRows(first, second) {
  const key = state.sort;
  const a = key === "run" ? first.run : first.row[key];
  const b = key === "run" ? second.run : second.row[key];
  let order = 0;
  if (typeof a === "string" || typeof b === "string") order = String(a).localeCompare(String(b));
  else order = (a ?? -Infinity) - (b ?? -Infinity) || 0;
  if (order === 0) order = first.row.step - second.row.step;
  return state.ascending ? order : -order;
}

const COLUMNS = [
  ["step", "Update"],
  ...(severalRuns ? [["run", "Run"]] : []),
  ["split", "Play"],
  ["task", "Task"],
  ["kind", "Kind"],
  ["won", "Success"],
  ["return", "Return"],
  ["turns", "Turns"],
];

function cellOf(key, { run, row }) {
  if (key === "step") {
    const label = `Open the episode of task ${row.task}, ${updateName(row.step)}`;
    const open = (event) => openEpisode({ run, row }, event.currentTarget);
    return make("button", { type: "button", class: "link", "aria-label": label, onclick: open }, updateName(row.step));
  }
  if (key === "run") return page.runs[run].name;
  if (key === "won") {
    const group = row.group ? make("span", { class: "note" }, ` ${row.group} of the group`) : null;
    if (row.won === null) return "–";
    return make("span", {}, row.won ? badge("won", "good") : badge("not won", "bad"), group);
  }
  if (key === "return" || key === "turns") return number(row[key]);
  return row[key] || "–";
}

function drawTable() {
  const rows = allRows();
  const found = rows.filter(matches).sort(compareRows);
  const shown = found.slice(0, state.shown);

  const leftOut = page.runs.reduce((sum, run) => sum + run.left_out, 0);
  let count = `${found.length} of ${rows.length} episodes`;
  if (leftOut) count += `; ${leftOut} more are in the run's files, left out here to keep the page small`;
  parts.count.textContent = count;

  const body = shown.map((entry) => {
    const isOpen = state.open && state.open.row === entry.row;
    const cells = COLUMNS.map(([key, label]) => make("td", { "data-label": label }, cellOf(key, entry)));
    return make("tr", { class: isOpen ? "open" : null }, cells);
  });
  if (!body.length) {
    const text = rows.length ? "No episode matches." : "No episode has been written yet.";
    body.push(make("tr", {}, make("td", { colspan: COLUMNS.length, class: "note" }, text)));
  }
  parts.body.replaceChildren(...body);
  parts.more.hidden = found.length <= shown.length;
  for (const [key, header] of parts.headers) {
    const order = state.ascending ? "ascending" : "descending";
    if (key === state.sort) header.setAttribute("aria-sort", order);
    else header.removeAttribute("aria-sort");
  }
}

function sortBy(key) {
  state.ascending = state.sort === key ? !state.ascending : false;
  state.sort = key;
  drawTable();
}

function field(label, control) {
  return make("label", {}, make("span", {}, label), control);
}

function filterInput(name, attributes) {
  const oninput = (event) => {
    state.filter[name] = event.target.value;
    state.shown = ROWS_AT_ONCE;
    drawTable();
  };
  return make("input", { ...attributes, oninput });
}

function filterSelect(name, options) {
  const onchange = (event) => {
    state.filter[name] = event.target.value;
    state.shown = ROWS_AT_ONCE;
    drawTable();
  };
  return make("select", { onchange }, options.map(([value, text]) => make("option", { value }, text)));
}

function drawBrowser(root) {
  const runs = page.runs.map((run, index) => [String(index), run.name]);
  const filters = make(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    field("Play", filterSelect("split", [["", "all"], ["training", "training"], ["evaluation", "evaluation"]])),
    severalRuns ? field("Run", filterSelect("run", [["", "all"], ...runs])) : null,
    field("From update", filterInput("from", { type: "number", min: 0, inputmode: "numeric" })),
    field("To update", filterInput("to", { type: "number", min: 0, inputmode: "numeric" })),
    field("Success", filterSelect("won", [["", "any"], ["yes", "won"], ["no", "not won"]])),
    field("Return at least", filterInput("least", { type: "number", step: "any" })),
    field("Task, kind or action", filterInput("text", { type: "search" })),
  );
  parts.headers = COLUMNS.map(([key, label]) => {
    const button = make("button", { type: "button", class: "link", onclick: () => sortBy(key) }, label);
    return [key, make("th", { scope: "col" }, button)];
  });
  parts.count = make("p", { class: "note", "aria-live": "polite" });
  parts.body = make("tbody");
  parts.more = make("button", { type: "button", class: "button", onclick: showMore }, "Show more");
  parts.reader = make("section", { class: "reader card", hidden: true, "aria-label": "Episode" });
  parts.reader.addEventListener("keydown", (event) => {
    if (event.key === "Escape") closeEpisode();
  });
  const headers = parts.headers.map(([, header]) => header);
  const table = make("table", { class: "stacked episodes" }, make("thead", {}, make("tr", {}, headers)), parts.body);
  root.replaceChildren(filters, parts.count, make("div", { class: "card scroll rows" }, table), parts.more, parts.reader);
  drawTable();
}

function showMore() {
  state.shown += ROWS_AT_ONCE;
  drawTable();
}

// --- one episode, or two of the same task side by side

async function detailOf({ run, row }) {
  const embedded = page.runs[run].details[row.id];
  if (embedded) return embedded;
  const answer = await fetch(`${page.runs[run].url}episode?id=${encodeURIComponent(row.id)}`);
  if (!answer.ok) throw new Error(`the episode cannot be read (${answer.status})`);
  return answer.json();
}

function sameTask({ run, row }) {
  const others = allRows().filter((other) => other.row.task === row.task && other.row !== row);
  const distance = (other) => {
    const otherRun = other.run === run ? 1 : 0; // another run first
    const otherPlay = other.row.split === row.split ? 0 : 1;
    return [otherRun, otherPlay, Math.abs(other.row.step - row.step)];
  };
  return others.sort((a, b) => {
    const [first, second] = [distance(a), distance(b)];
    const place = first.findIndex((value, index) => value !== second[index]);
    return place < 0 ? 0 : first[place] - second[place];
  });
}

function openEpisode(entry, opener) {
  state.open = entry;
  state.opener = opener || null;
  const others = sameTask(entry);
  state.beside = others.length && others[0].run !== entry.run ? others[0] : null;
  drawTable();
  drawReader(Boolean(opener));
}

function closeEpisode() {
  const row = state.open && state.open.row;
  state.open = null;
  state.beside = null;
  parts.reader.hidden = true;
  drawTable();
  const button = row && [...parts.body.querySelectorAll("button")].find((b) => b.getAttribute("aria-label").includes(row.task));
  if (button) button.focus();
}

async function drawReader(moveFocus) {
  const request = ++state.request;
  const entries = [state.open, state.beside].filter(Boolean);
  let columns;
  try {
    const details = await Promise.all(entries.map(detailOf));
    columns = entries.map((entry, index) => drawEpisode(entry, details[index], details[0]));
  } catch (error) {
    columns = [make("p", { class: "note" }, `The episode is not there any more: ${error.message}`)];
  }
  if (request !== state.request || !state.open) return; // another one was opened meanwhile

  const title = make("h3", { tabindex: -1 }, state.open.row.task || "Episode");
  const close = make("button", { type: "button", class: "button", onclick: closeEpisode }, "Close");
  parts.reader.replaceChildren(
    make("div", { class: "reader-head" }, title, close),
    drawModes(),
    drawBeside(),
    make("div", { class: columns.length > 1 ? "columns" : "column" }, columns),
  );
  parts.reader.hidden = false;
  if (moveFocus) {
    parts.reader.scrollIntoView({ block: "start" });
    title.focus({ preventScroll: true });
  }
}

function drawModes() {
  const choices = Object.entries(MODES).map(([mode, { label }]) => {
    const onchange = () => {
      state.mode = mode;
      drawReader(false).then(() => parts.reader.querySelector(`input[value="${mode}"]`).focus());
    };
    const input = make("input", { type: "radio", name: "mode", value: mode, checked: mode === state.mode, onchange });
    return make("label", {}, input, make("span", {}, label));
  });
  const { meaning, legend } = MODES[state.mode];
  const scale = legend.map(([text, amount, tone]) => token(text, { amount, tone }));
  return make(
    "div",
    { class: "modes" },
    make("fieldset", {}, make("legend", { class: "hidden" }, "Colour tokens by"), choices),
    make("p", { class: "note" }, `${meaning}${ruleText()} `, make("span", { class: "scale" }, scale)),
  );
}

function ruleText() {
  const rho = page.runs[state.open.run].rho;
  if (state.mode !== "mask") return "";
  if (rho === null) return " It acts on all tokens of selected turns.";
  return ` It acts on selected turns, on tokens with p ≤ ρ = ${rho} (CMAE).`;
}

function drawBeside() {
  const others = sameTask(state.open).slice(0, 200);
  if (!others.length) return make("p", { class: "note" }, "No other episode of this task is here.");
  const name = ({ run, row }) => {
    const result = row.won === null ? "" : row.won ? ", won" : ", not won";
    return `${severalRuns ? `${page.runs[run].name}: ` : ""}${updateName(row.step)}, ${row.split}${result}`;
  };
  const options = others.map((other, index) => {
    const chosen = state.beside && other.row === state.beside.row;
    return make("option", { value: index, selected: Boolean(chosen) }, name(other));
  });
  const none = make("option", { value: "", selected: !state.beside }, "nothing");
  const onchange = (event) => {
    state.beside = event.target.value === "" ? null : others[Number(event.target.value)];
    drawReader(false);
  };
  return make("p", { class: "beside" }, field("Beside it, of the same task", make("select", { onchange }, none, options)));
}

function drawEpisode({ run, row }, detail, first) {
  const turns = detail.turns.map((turn, index) => {
    const other = first.turns[index];
    const differs = detail !== first && (!other || other.action !== turn.action);
    return drawTurn(turn, index, { run, row, differs });
  });
  if (detail.turns.length < detail.total) {
    const text = `The first ${detail.turns.length} of ${detail.total} turns.`;
    turns.push(make("p", { class: "note" }, text));
  }
  const head = make(
    "p",
    { class: "episode-head" },
    severalRuns ? make("b", {}, page.runs[run].name) : null,
    make("b", {}, updateName(row.step)),
    make("span", {}, row.split),
    row.kind ? make("span", {}, row.kind) : null,
    row.won === null ? null : row.won ? badge("won", "good") : badge("not won", "bad"),
    make("span", { class: "note" }, `${row.turns} turns · return ${number(row.return)}`),
    row.group ? make("span", { class: "note" }, `${row.group} of the group won`) : null,
  );
  const prompt = detail.prompt ? folded("Prompt", detail.prompt) : null;
  return make("article", {}, head, prompt, turns);
}

function folded(title, text) {
  return make("details", {}, make("summary", {}, title), make("pre", {}, text));
}

function drawTurn(turn, index, { run, row, differs }) {
  const advantage = typeof turn.advantage === "number" ? turn.advantage : null;
  const facts = make(
    "p",
    { class: "action" },
    make("code", {}, turn.action || "–"),
    differs ? badge("other action", "pick") : null,
    turn.selected ? badge("selected", "pick") : null,
    turn.valid === false ? badge("invalid", "bad") : null,
    advantage === null ? null : make("span", { class: "note" }, `A ${number(advantage)}`),
    typeof turn.mean_entropy === "number" ? make("span", { class: "note" }, `H ${turn.mean_entropy.toFixed(2)} nats`) : null,
  );
  const observed = [
    make("div", {}, make("h4", {}, "Next observation"), make("pre", {}, drawObservation(turn, run, row))),
  ];
  if (turn.predicted) {
    const pieces = turn.predicted.map(([text, other]) => (other ? make("mark", {}, text) : text));
    const exact = turn.exact ? badge("exact", "good") : null;
    const title = make("h4", {}, "Model's prediction ", exact);
    observed.push(make("div", {}, title, make("pre", {}, pieces.length ? pieces : "–")));
  }
  return make(
    "section",
    { class: "turn" },
    make("span", { class: "index" }, String(index + 1)),
    make(
      "div",
      {},
      turn.prompt ? folded("Prompt", turn.prompt) : null,
      facts,
      make("h4", {}, "Response"),
      make("pre", {}, drawResponse(turn)),
      make("div", { class: "pair" }, observed),
    ),
  );
}

/** A token in its colour. `amount` is from 0 to 1, `tone` one of heat, calm, kept and masked. */
function token(text, { amount, tone, title }) {
  const element = make("i", { class: tone, title }, text);
  element.style.setProperty("--q", amount.toFixed(3));
  return element;
}

function drawResponse(turn) {
  const advantages = Array.isArray(turn.advantage) ? turn.advantage : null;
  return turn.tokens.map((text, index) => {
    const p = turn.p && turn.p[index];
    const entropy = turn.entropy && turn.entropy[index];
    const advantage = advantages ? advantages[index] : turn.advantage;
    const title = numbersText({ p, entropy, advantage });
    if (index === 0) text = text.replace(/^\s+/, ""); // often a line end, after the prompt
    if (state.mode === "probability" && typeof p === "number") {
      return token(text, { amount: 1 - p, tone: "heat", title });
    }
    if (state.mode === "entropy" && typeof entropy === "number") {
      return token(text, { amount: Math.min(1, entropy / ENTROPY_SCALE), tone: "heat", title });
    }
    if (state.mode === "advantage" && typeof advantage === "number") {
      const amount = Math.min(1, Math.abs(advantage) / ADVANTAGE_SCALE);
      return token(text, { amount, tone: advantage < 0 ? "heat" : "calm", title });
    }
    return title ? make("i", { title }, text) : text;
  });
}

function drawObservation(turn, run, row) {
  const rho = page.runs[run].rho;
  const pieces = turn.observation.map(([text, p]) => {
    if (p === null) return text;
    const title = numbersText({ p });
    if (state.mode === "probability") return token(text, { amount: 1 - p, tone: "heat", title });
    if (state.mode !== "mask" || (row.split === "training" && turn.selected === false)) {
      return make("i", { title }, text);
    }
    const isKept = rho === null || p <= rho;
    return token(text, { amount: isKept ? 1 : 0, tone: isKept ? "kept" : "masked", title });
  });
  return pieces.length ? pieces : "–";
}

function numbersText({ p, entropy, advantage }) {
  const texts = [];
  if (typeof p === "number") texts.push(`p = ${p.toFixed(3)}`);
  if (typeof entropy === "number") texts.push(`entropy ${entropy.toFixed(2)} nats`);
  if (typeof advantage === "number") texts.push(`advantage ${number(advantage)}`);
  return texts.join(", ") || null;
}

// --- start

drawBrowser(document.getElementById("browser"));
if (!page.live) {
  const newest = allRows().filter(({ row }) => row.split === "evaluation").sort(compareRows);
  const entry = newest[0] || allRows().sort(compareRows)[0];
  if (entry) openEpisode(entry, null);
}
