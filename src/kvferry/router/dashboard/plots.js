// Lines over the last five minutes, or over one while there is no more, drawn as SVG. One point per second, the newest at the right edge.

import { element, setText, svgElement } from "./dom.js";
import { bytesPerSecond, duration, roundUp, roundUpBytes } from "./format.js";

const WIDTHS = [60, 300];
const HEIGHT = 100;

export class Plot {
  // lines: [{ label, colour, column, isArea }] with columns of the state's series; format: of its values.
  constructor(title, lines, format) {
    this.lines = lines.map((line) => ({ ...line, values: [] }));
    this.format = format;
    this.cursor = null;
    this.top = 1;
    this.width = WIDTHS[0];
    this.caption = element("figcaption", {}, element("b", { text: title }));
    for (const line of this.lines) {
      line.output = element("span", { className: "value" });
      this.caption.append(element("span", { className: `key ${line.colour}` }, `${line.label} `, line.output));
    }
    this.svg = svgElement("svg", { preserveAspectRatio: "none", role: "img", tabindex: "0" });
    for (const y of [0, 50]) this.svg.append(svgElement("line", { class: "grid", x1: 0, x2: WIDTHS.at(-1), y1: y, y2: y }));
    for (const line of this.lines) {
      line.area = svgElement("path", { class: `area ${line.colour}` });
      line.path = svgElement("path", { class: `series ${line.colour}`, "data-column": line.column });
      this.svg.append(line.area, line.path);
    }
    this.mark = svgElement("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg.append(this.mark);
    this.scaleTop = element("span");
    this.scaleMiddle = element("span");
    this.ages = element("div", { className: "ages" }, element("span"), element("span", { text: "now" }));
    const scale = element("div", { className: "scale" }, this.scaleTop, this.scaleMiddle, element("span", { text: "0" }));
    this.node = element("figure", {}, this.caption, element("div", { className: "frame" }, this.svg, scale, this.ages));
    this.title = title;
    this.#listen();
  }

  update(series) {
    for (const line of this.lines) line.values = series[line.column].slice(-WIDTHS.at(-1));
    this.width = WIDTHS.find((width) => width >= this.lines[0].values.length);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    setText(this.ages.firstElementChild, `${duration(this.width)} ago`);
    const largest = Math.max(0, ...this.lines.flatMap((line) => line.values).filter((value) => value !== null));
    this.top = this.format === bytesPerSecond ? roundUpBytes(largest) : roundUp(largest);
    setText(this.scaleTop, this.format(this.top));
    setText(this.scaleMiddle, this.format(this.top / 2));
    for (const line of this.lines) {
      const points = this.#points(line.values);
      line.path.setAttribute("d", lineThrough(points));
      if (line.isArea) line.area.setAttribute("d", areaBelow(points));
      line.path.dataset.points = String(points.filter((point) => point !== null).length);
    }
    this.#tell();
  }

  #points(values) {
    const first = this.width - values.length;
    return values.map((value, index) => (value === null ? null : [first + index + 0.5, HEIGHT * (1 - value / this.top)]));
  }

  // Of the second under the cursor, else of the newest that has a value.
  #tell() {
    const length = this.lines[0].values.length;
    const at = this.cursor === null ? null : this.cursor - (this.width - length);
    const words = [];
    for (const line of this.lines) {
      const newest = line.values.findLast((value) => value !== null);
      const value = at === null ? newest : line.values[at];
      setText(line.output, this.format(value));
      words.push(`${line.label} ${this.format(value)}`);
    }
    const when = at === null ? "newest" : `${duration(length - at)} ago`;
    setText(this.ages.lastElementChild, at === null ? "now" : when);
    this.svg.setAttribute("aria-label", `${this.title}, ${when}: ${words.join(", ")}. Arrow keys move through time.`);
    this.mark.setAttribute("visibility", at === null ? "hidden" : "visible");
    if (at !== null) {
      this.mark.setAttribute("x1", this.cursor + 0.5);
      this.mark.setAttribute("x2", this.cursor + 0.5);
    }
  }

  #moveTo(place) {
    this.cursor = place === null ? null : Math.min(this.width - 1, Math.max(0, Math.floor(place)));
    this.#tell();
  }

  #listen() {
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.#moveTo((this.width * (event.clientX - box.left)) / box.width);
    });
    this.svg.addEventListener("pointerleave", () => this.#moveTo(null));
    this.svg.addEventListener("blur", () => this.#moveTo(null));
    this.svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -30, PageDown: 30 }[event.key];
      if (step === undefined && event.key !== "Escape") return;
      event.preventDefault();
      this.#moveTo(step === undefined ? null : (this.cursor ?? this.width) + step);
    });
  }
}

// Seconds without a value are gaps. A value between two gaps is a line to itself, which round ends make a dot.
function lineThrough(points) {
  let text = "";
  points.forEach((point, index) => {
    if (point === null) return;
    const before = index > 0 ? points[index - 1] : null;
    text += `${before === null ? "M" : "L"}${point[0]} ${point[1].toFixed(2)}`;
    if (before === null && (index + 1 === points.length || points[index + 1] === null)) text += "h0.01";
  });
  return text;
}

function areaBelow(points) {
  const known = points.filter((point) => point !== null);
  if (known.length < 2) return "";
  const along = known.map((point) => `L${point[0]} ${point[1].toFixed(2)}`).join("");
  return `M${known[0][0]} ${HEIGHT}${along}L${known.at(-1)[0]} ${HEIGHT}Z`;
}
