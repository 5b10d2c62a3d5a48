// Asks the router for its state every second and shows it. Nothing here is from elsewhere, and no request leaves this origin.

import { byId, element, setData, setText, syncRows } from "./dom.js";
import { bytesPerSecond, count, duration } from "./format.js";
import { Plot } from "./plots.js";
import { fillErrors, fillInstances, fillKv, fillRequests, fillTiers } from "./tables.js";
import { showNoTimeline, showTimeline } from "./timeline.js";

const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const KEY = "kvferry.key";

const latency = (column, colours) => [
  { label: "p50", colour: colours[0], column: `${column}_p50` },
  { label: "p99", colour: colours[1], column: `${column}_p99` },
];
const plots = [
  new Plot("Requests per second", [
    { label: "all", colour: "blue", column: "requests", isArea: true },
    { label: "errors", colour: "red", column: "errors", isArea: true },
  ], count),
  new Plot("Time to first token", latency("ttft", ["green", "violet"]), duration),
  new Plot("Handover to first token", latency("handover", ["teal", "amber"]), duration),
  new Plot("KV moved per second", [{ label: "all instances", colour: "blue", column: "moved_bytes", isArea: true }], bytesPerSecond),
  new Plot("Tokens per second", [{ label: "all instances", colour: "green", column: "tokens", isArea: true }], count),
  new Plot("Relayed per second", [{ label: "to clients", colour: "violet", column: "relayed_bytes", isArea: true }], bytesPerSecond),
];

let apiKey = readKey();
let lastState = null;
let lastSeen = null;
let timer = null;
let isAsking = false;
let opened = { id: "", isOver: false };

// -- asking ------------------------------------------------------------------------------------------------------------

class KeyWanted extends Error {}

// What the router says against us, in its own words.
async function objection(answer) {
  try {
    return String((await answer.json()).error.message).slice(0, 300);
  } catch {
    return "";
  }
}

async function ask(path) {
  const headers = apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
  const answer = await fetch(new URL(path, document.baseURI), {
    headers, cache: "no-store", credentials: "omit", redirect: "error", signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (answer.status === 401 || answer.status === 403) throw new KeyWanted(await objection(answer));
  return answer;
}

async function poll() {
  if (isAsking) return;
  isAsking = true;
  clearTimeout(timer);
  try {
    const answer = await ask("dashboard/state");
    if (!answer.ok) throw new Error(`the router answers with status ${answer.status}`);
    show(await answer.json());
    await refreshTimeline();
  } catch (error) {
    if (error instanceof KeyWanted) askForKey(error.message);
    else showLoss(error);
  } finally {
    isAsking = false;
    // Nobody looks at a hidden page; it asks again when somebody does.
    if (!document.hidden && byId("key-form").hidden) timer = setTimeout(poll, POLL_MS);
  }
}

// -- showing -----------------------------------------------------------------------------------------------------------

function show(state) {
  lastState = state;
  lastSeen = performance.now();
  byId("page").hidden = false;
  byId("page").classList.remove("is-stale");
  byId("lost").hidden = true;
  byId("key-form").hidden = true;
  setConnection("live", "live");
  byId("draining").hidden = !state.router.is_draining;
  setText(byId("router"), aboutRouter(state.router));
  showTiles(state);
  for (const plot of plots) plot.update(state.series);
  showTables();
}

function showTables() {
  if (lastState === null) return;
  const wanted = byId("filter").value.trim().toLowerCase().replaceAll("_", " ");
  fillInstances(lastState, wanted);
  fillKv(lastState, wanted);
  fillTiers(lastState, wanted);
  fillRequests(lastState, openTimeline);
  fillErrors(lastState, openTimeline);
}

function aboutRouter(router) {
  const policies = Object.entries(router.policies).map(([role, policy]) => `${role} by ${policy.replaceAll("_", " ")}`);
  const conversations = router.conversations === null ? [] : [`${count(router.conversations)} conversations kept`];
  return [`version ${router.version}`, `up ${duration(router.uptime_s)}`, ...policies, ...conversations].join(" · ");
}

function showTiles(state) {
  const { router, headline } = state;
  const of = (limit) => (limit === null ? "" : `of ${count(limit)}`);
  const tiles = [
    ["Running", count(router.running), of(router.max_running)],
    ["Queued", count(router.queued), of(router.max_queued)],
    ["Requests/s", count(headline.requests_per_s), ""],
    ["Errors/s", count(headline.errors_per_s), ""],
    ["First token p50", duration(headline.ttft_p50), `p99 ${duration(headline.ttft_p99)}`],
    ["Handover p50", duration(headline.handover_p50), `p99 ${duration(headline.handover_p99)}`],
    ["Tokens/s", count(headline.tokens_per_s), ""],
    ["KV moved", bytesPerSecond(headline.moved_bytes_per_s), ""],
  ];
  syncRows(byId("tiles"), tiles, ([name]) => name, createTile, (tile, [, value, more]) => {
    setText(tile.lastElementChild.firstElementChild, value);
    setText(tile.lastElementChild.lastElementChild, more);
  });
}

const createTile = ([name]) => element("div", {}, element("dt", { text: name }), element("dd", {}, element("span"), " ", element("small")));

function setConnection(state, words) {
  setText(byId("connection"), words);
  setData(byId("connection"), "connection", state);
}

function showLoss(error) {
  const since = lastSeen === null ? "" : ` The figures shown are ${duration(Math.round((performance.now() - lastSeen) / 1000))} old.`;
  const why = error instanceof TypeError || error.name === "TimeoutError" || error.name === "SyntaxError" ? "" : ` (${error.message})`;
  setText(byId("lost"), `Connection to the router lost${why}; trying again every second.${since}`);
  byId("lost").hidden = false;
  byId("page").classList.add("is-stale");
  setConnection("lost", "connection lost");
}

// -- API key -----------------------------------------------------------------------------------------------------------

function readKey() {
  // `kvferry up` prints a link with the key after the #. The key must not stay in the address.
  const named = new URLSearchParams(location.hash.slice(1));
  const linked = named.get("key") ?? "";
  if (linked) {
    named.delete("key");
    history.replaceState(null, "", location.pathname + location.search + (named.size ? `#${named}` : ""));
    keepKey(linked);
    return linked;
  }
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";  // storage is switched off: the key is asked for once per page
  }
}

function askForKey(words) {
  setText(byId("key-refused"), [apiKey ? "This key was refused." : "", words && `The router says: ${words}.`].filter(Boolean).join(" "));
  if (byId("key-form").hidden) {
    byId("key-form").hidden = false;
    byId("key").focus();
  }
  byId("lost").hidden = true;
  byId("page").classList.add("is-stale");
  setConnection("locked", "key needed");
}

function useKey(event) {
  event.preventDefault();
  apiKey = byId("key").value;
  byId("key").value = "";
  keepKey(apiKey);
  poll();
}

function keepKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // kept in memory
  }
}

// -- timeline ----------------------------------------------------------------------------------------------------------

function openTimeline(id) {
  const hash = `#request=${encodeURIComponent(id)}`;
  if (location.hash === hash) followHash();
  else location.hash = hash;
}

function closeTimeline() {
  opened = { id: "", isOver: false };
  byId("timeline").hidden = true;
  history.replaceState(null, "", location.pathname + location.search);
}

async function followHash() {
  const id = new URLSearchParams(location.hash.slice(1)).get("request") ?? "";
  opened = { id, isOver: false };
  byId("timeline").hidden = id === "";
  if (id === "") return;
  showNoTimeline(id, "loading …");
  await refreshTimeline();
  byId("timeline").focus();
}

async function refreshTimeline() {
  const { id, isOver } = opened;
  if (id === "" || isOver) return;
  let answer;
  try {
    answer = await ask(`dashboard/requests/${encodeURIComponent(id)}`);
    const view = answer.ok ? await answer.json() : null;
    if (opened.id !== id) return;
    if (view !== null) showTimeline(view);
    else showNoTimeline(id, answer.status === 404 ? "The router has no record of this request." : `The router answers with status ${answer.status}.`);
    opened.isOver = view !== null && view.duration_s !== null;
  } catch (error) {
    if (opened.id === id && answer === undefined) showNoTimeline(id, error instanceof KeyWanted ? "A key is needed." : "The router does not answer.");
  }
}

// -- start -------------------------------------------------------------------------------------------------------------

byId("plots").append(...plots.map((plot) => plot.node));
byId("key-form").addEventListener("submit", useKey);
byId("filter").addEventListener("input", showTables);
byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("find-id").value.trim();
  if (id) openTimeline(id);
});
byId("timeline-close").addEventListener("click", closeTimeline);
document.addEventListener("visibilitychange", () => document.hidden || poll());
addEventListener("hashchange", followHash);
poll();
followHash();
