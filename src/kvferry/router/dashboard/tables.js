// The tables of the page, each filled from the state anew every second.

import { byId, element, setData, setText, syncRows } from "./dom.js";
import { age, bytes, bytesPerSecond, count, duration, percent } from "./format.js";

export function fillInstances(state, wanted) {
  const shown = state.instances.filter((one) => isWanted(one, wanted));
  syncRows(byId("instances").tBodies[0], shown, keyOf, () => row("name", "word", "state", "number", "number", "number", "word", "number", "word", "words"), (node, one) => {
    const [name, role, health, inFlight, running, waiting, cache, tokens, mode, error] = node.children;
    fillWords(name, one.name, one.model ? `${one.name}, model ${one.model}` : one.name);
    setText(role, one.role);
    fillHealth(health, one);
    setText(inFlight, count(one.in_flight));
    setText(running, count(one.running));
    setText(waiting, count(one.waiting));
    fillMeter(cache, one.cache_usage);
    setText(tokens, count(one.tokens_per_s));
    setText(mode, one.mode || "–");
    fillWords(error, one.last_error);
  });
  byId("no-instances").hidden = state.instances.length > 0;
  const well = state.instances.filter((one) => one.state === "healthy").length;
  const hidden = state.instances.length - shown.length;
  setText(byId("instances-sum"), `${well} of ${state.instances.length} healthy${hidden ? `, ${hidden} not shown` : ""}`);
}

export function fillKv(state, wanted) {
  const telling = state.instances.filter((one) => [one.leases, one.active_transfers, one.transfers, one.moved_bytes].some((value) => value !== null));
  const classes = ["name", "word", ...Array(8).fill("number")];
  syncRows(byId("kv").tBodies[0], telling.filter((one) => isWanted(one, wanted)), keyOf, () => row(...classes), (node, one) => {
    fillWords(node.children[0], one.name);
    const values = [
      one.role, count(one.leases), count(one.held_blocks), count(one.active_transfers), bytesPerSecond(one.moved_bytes_per_s),
      count(one.transfers), bytes(one.moved_bytes), count(one.transfer_failures), count(one.expired),
    ];
    values.forEach((value, index) => setText(node.children[index + 1], value));
  });
  byId("no-kv").hidden = telling.length > 0;
  const sum = (field) => telling.reduce((total, one) => total + (one[field] ?? 0), 0);
  setText(byId("kv-sum"), `${count(sum("leases"))} leases on ${count(sum("held_blocks"))} blocks, ${count(sum("active_transfers"))} transfers in flight`);
}

// An instance has one row per tier; its name and its hit rate are in the first, and span all of them.
export function fillTiers(state, wanted) {
  const telling = state.instances.filter((one) => one.offload !== null);
  byId("tiers-section").hidden = telling.length === 0;
  const tiers = telling.filter((one) => isWanted(one, wanted)).flatMap((one) => {
    const all = one.offload.tiers;
    return all.map((tier, index) => ({ one, tier, span: index === 0 ? all.length : 0 }));
  });
  syncRows(byId("tiers").tBodies[0], tiers, ({ one, tier, span }) => `${keyOf(one)} ${tier.name} ${span}`, ({ span }) => tierRow(span), (node, { one, tier, span }) => {
    const cells = [...node.children];
    if (span > 0) {
      fillNote(cells.shift(), one.name, one.role);
      fillHits(cells.shift(), one.offload);
    }
    fillTier(cells, tier);
  });
  const sum = (field) => telling.reduce((total, one) => total + (one.offload[field] ?? 0), 0);
  const queried = sum("queried_tokens");
  setText(byId("tiers-sum"), queried > 0 ? `${percent(Math.min(1, sum("hit_tokens") / queried))} of ${count(queried)} prompt tokens looked up in the last minute came from tiers` : "no prompt was looked up in the last minute");
}

export function fillRequests(state, open) {
  const rows = [...state.live, ...state.recent];
  const listed = new Set(rows.map(rowKey));
  rows.push(...state.failed.filter((one) => !listed.has(rowKey(one))));
  syncRows(byId("requests").tBodies[0], rows, rowKey, () => requestRow(open), (node, one) => {
    const [id, health, status, began, took, first, prefill, decode, notes] = node.children;
    fillOpener(id.firstElementChild, one.id);
    setText(health, one.state);
    setData(health, "state", one.state);
    setText(status, one.status ? String(one.status) : "–");
    setText(began, age(one.age_s));
    setText(took, one.duration_s === null ? "–" : duration(one.duration_s));
    setText(first, duration(one.ttft_s));
    fillWords(prefill, one.prefill || "–");
    fillWords(decode, one.decode || "–");
    fillWords(notes, notesOf(one));
  });
  byId("no-requests").hidden = rows.length > 0;
  setText(byId("requests-sum"), `${count(state.num_live)} in flight${state.num_live > state.live.length ? `, the oldest ${state.live.length} shown` : ""}`);
}

export function fillErrors(state, open) {
  syncRows(byId("errors").tBodies[0], state.errors, (one) => `${one.status} ${one.text}`, () => errorRow(open), (node, one) => {
    const [last, times, status, text, request] = node.children;
    setText(last, age(one.age_s));
    setText(times, `${count(one.count)} ×`);
    setText(status, one.status ? String(one.status) : "–");
    fillWords(text, one.text);
    fillOpener(request.firstElementChild, one.request_id);
  });
  byId("no-errors").hidden = state.errors.length > 0;
}

function row(...classes) {
  const cells = classes.map((className, index) => element(index ? "td" : "th", index ? { className } : { className, scope: "row" }));
  return element("tr", {}, ...cells);
}

function tierRow(span) {
  const node = row("word", "fill", "number", "number", "number", "number", "number", "words");
  if (span > 0) node.prepend(element("th", { className: "name", scope: "row", rowspan: span }), element("td", { className: "hits", rowspan: span }));
  return node;
}

function requestRow(open) {
  const node = row("name", "state", "number", "number", "number", "number", "name", "name", "words");
  node.firstElementChild.append(opener(open));
  return node;
}

function errorRow(open) {
  const node = element("tr", {}, ...["number", "number", "number", "words", "name"].map((className) => element("td", { className })));
  node.lastElementChild.append(opener(open));
  return node;
}

function opener(open) {
  const button = element("button", { type: "button", className: "link id clip" });
  button.addEventListener("click", () => open(button.requestId));
  return button;
}

function fillOpener(button, id) {
  button.requestId = id;
  button.hidden = id === "";
  setText(button, id);
}

const keyOf = (one) => `${one.role} ${one.name}`;

// Clients may send one id twice; rows of one key are told apart by their order.
const rowKey = (one) => `${one.id} ${one.route}`;

function isWanted(one, wanted) {
  return wanted === "" || [one.name, one.role, one.state, one.mode, one.model].some((word) => word.toLowerCase().replaceAll("_", " ").includes(wanted));
}

function fillHealth(cell, one) {
  const until = one.returns_in_s === null ? "" : `, tried again in ${duration(one.returns_in_s)}`;
  const failures = one.failures ? `, ${one.failures} failed in a row` : "";
  const silence = one.read_age_s === null ? ", no metrics" : "";
  setText(cell, `${one.state.replaceAll("_", " ")}${failures}${until}${silence}`);
  setData(cell, "state", one.state);
}

function fillMeter(cell, part) {
  if (cell.firstElementChild === null) cell.append(element("span", { className: "meter", "aria-hidden": "true" }, element("span")), element("span"));
  const [meter, text] = cell.children;
  meter.hidden = part === null;
  meter.firstElementChild.style.width = `${100 * Math.min(1, part ?? 0)}%`;
  setData(meter, "level", part > 0.97 ? "full" : part > 0.85 ? "high" : "normal");
  setText(text, percent(part));
}

function fillTier([name, fill, ...others], tier) {
  setText(name, tier.name);
  if (name.title !== tier.name) name.title = tier.name;
  const part = tier.max_bytes > 0 && tier.used_bytes !== null ? Math.min(1, tier.used_bytes / tier.max_bytes) : null;
  const used = bytes(tier.used_bytes) + (part !== null ? ` of ${bytes(tier.max_bytes)}` : tier.max_bytes === 0 ? ", no limit" : "");
  fillBar(fill, part, part === null ? "" : percent(part), used);
  const problems = others.pop();
  const values = [count(tier.objects), bytesPerSecond(tier.loaded_bytes_per_s), percent(tier.load_share), bytesPerSecond(tier.stored_bytes_per_s), count(tier.evictions_per_s)];
  values.forEach((value, index) => setText(others[index], value));
  fillWords(problems, problemsOf(tier));
  setData(problems, "level", tier.refused || tier.failed_loads || tier.failed_stores ? "warn" : "normal");
}

function fillHits(cell, offload) {
  const note = offload.queried_tokens > 0 ? `of ${count(offload.queried_tokens)} tokens` : "";
  fillBar(cell, offload.hit_rate, percent(offload.hit_rate), note);
  const title = offload.skipped_tokens > 0 ? `${count(offload.skipped_tokens)} more tokens were found, but computing them was faster` : "";
  if (cell.title !== title) cell.title = title;
}

// A full tier is a normal tier: its bar has no colours of warning.
function fillBar(cell, part, words, note) {
  if (cell.firstElementChild === null) cell.append(element("span", { className: "meter", "aria-hidden": "true" }, element("span")), element("span", { className: "part" }), element("span", { className: "quiet" }));
  const [meter, text, more] = cell.children;
  meter.hidden = part === null;
  meter.firstElementChild.style.width = `${100 * (part ?? 0)}%`;
  setText(text, words);
  setText(more, note);
}

function fillNote(cell, words, note) {
  if (cell.children.length < 2) cell.append(element("span", { className: "clip" }), element("span", { className: "quiet clip" }));
  setText(cell.firstElementChild, words);
  setText(cell.lastElementChild, note);
  if (cell.title !== words) cell.title = words;
}

function problemsOf(tier) {
  const problems = [
    [tier.refused, "refused"], [tier.failed_loads, "loads failed"], [tier.failed_stores, "stores failed"], [tier.dropped_stores, "stores dropped"],
  ];
  return problems.filter(([number]) => number > 0).map(([number, words]) => `${count(number)} ${words}`).join(", ");
}

// Long text is cut to a few lines; all of it is in the title.
function fillWords(cell, words, title = words) {
  if (cell.firstElementChild === null) cell.append(element("span", { className: "clip" }));
  setText(cell.firstElementChild, words);
  if (cell.title !== title) cell.title = title;
}

function notesOf(one) {
  const notes = [];
  if (one.retries) notes.push(one.retries === 1 ? "one retry" : `${one.retries} retries`);
  if (one.fallback) notes.push(`D alone: ${one.fallback}`);
  if (one.is_conversation) notes.push("conversation");
  return notes.join(", ");
}
