// One request's phases as bars on a common scale.

import { byId, element, setData, setText, syncRows } from "./dom.js";
import { age, bytes, duration } from "./format.js";

const EXPLAINED = {
  queued: "The request waits in the router's queue",
  prefill: "P computes the prompt",
  received: "D reads the request and hands it to its engine",
  lease: "D attaches to P's lease on the blocks",
  blocks: "D waits for free blocks of its own",
  transfer: "The KV moves",
  confirm: "P confirms that the lease was alive all the time",
  scheduled: "D schedules the request into a step",
  "first token": "D computes the last prompt token and answers",
  decode: "D has not answered yet",
  streaming: "The answer is relayed",
  failed: "D could not fetch the KV",
};

export function showTimeline(view) {
  setText(byId("timeline-title"), `Timeline of ${view.id}`);
  setText(byId("timeline-facts"), facts(view).join(" · "));
  const whole = view.duration_s ?? view.age_s;
  syncRows(byId("phases").tBodies[0], view.phases, (phase) => phase.name, createPhase, (row, phase) => updatePhase(row, phase, whole));
  setText(byId("timeline-note"), note(view));
}

export function showNoTimeline(id, why) {
  setText(byId("timeline-title"), `Timeline of ${id}`);
  setText(byId("timeline-facts"), why);
  byId("phases").tBodies[0].replaceChildren();
  setText(byId("timeline-note"), "");
}

function facts(view) {
  const list = [view.route, view.status ? `${view.state} with status ${view.status}` : view.state, `arrived ${age(view.age_s)}`];
  list.push(view.duration_s === null ? "in progress" : `took ${duration(view.duration_s)}`);
  if (view.relayed_bytes) list.push(`${bytes(view.relayed_bytes)} relayed`);
  if (view.retries) list.push(view.retries === 1 ? "one retry" : `${view.retries} retries`);
  if (view.conversation) list.push(`conversation ${view.conversation}`);
  if (view.fallback) list.push(`computed by D alone: ${view.fallback}`);
  if (view.error) list.push(view.error);
  return list;
}

function note(view) {
  const wasAsked = view.phases.some((phase) => phase.name === "decode" && !phase.is_failed);
  if (view.has_transfer || !wasAsked) return "";
  return "The decode instance does not report when it attached to the lease, read and confirmed; the wait for its answer is shown as one phase.";
}

function createPhase() {
  const bar = element("span");
  const row = element("tr", {}, element("th", { scope: "row" }));
  row.append(element("td", {}, element("div", { className: "track" }, bar)), element("td", { className: "number" }), element("td", { className: "where" }));
  return row;
}

function updatePhase(row, phase, whole) {
  const [name, when, takes, where] = row.children;
  const end = phase.ended_s ?? whole;
  const bar = when.firstElementChild.firstElementChild;
  setText(name, phase.name);
  name.title = EXPLAINED[phase.name] ?? "";
  setData(bar, "phase", phase.name);
  setData(bar, "failed", String(phase.is_failed));
  setData(bar, "open", String(phase.ended_s === null));
  const scale = whole > 0 ? 100 / whole : 0;
  bar.style.left = `${Math.min(100, phase.began_s * scale)}%`;
  bar.style.width = `${Math.max(0, Math.min(100, (end - phase.began_s) * scale))}%`;
  when.title = `from ${duration(phase.began_s)} to ${duration(end)}`;
  setText(takes, phase.ended_s === null ? `${duration(end - phase.began_s)} …` : duration(end - phase.began_s));
  setText(where, [phase.instance, phase.is_failed ? `failed: ${phase.detail}` : phase.detail].filter(Boolean).join(", "));
}
