// Numbers as people read them. Whatever is not a number is shown as a dash: nobody counted it.

const DASH = "–";

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

// Three digits, and no zeros for the sake of them.
const rounded = (value) => String(Number(value.toFixed(value >= 100 ? 0 : value >= 10 ? 1 : 2)));

function scaled(value, step, units) {
  let unit = 0;
  while (Math.abs(value) >= step && unit < units.length - 1) {
    value /= step;
    unit += 1;
  }
  return unit === 0 && units[0] === "" ? rounded(value) : `${rounded(value)} ${units[unit]}`;
}

export function count(value) {
  if (!isNumber(value)) return DASH;
  return Number.isInteger(value) && value < 10000 ? String(value) : scaled(value, 1000, ["", "k", "M", "G", "T"]);
}

export const bytes = (value) => (isNumber(value) ? scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]) : DASH);

export const bytesPerSecond = (value) => (isNumber(value) ? `${bytes(value)}/s` : DASH);

export const percent = (part) => (isNumber(part) ? `${(100 * part).toFixed(0)} %` : DASH);

const minutes = (seconds) => `${Math.floor(seconds / 60)} min${seconds % 60 ? ` ${seconds % 60} s` : ""}`;

export function duration(seconds) {
  if (!isNumber(seconds)) return DASH;
  if (seconds < 0.0000005) return "0 s";
  if (seconds < 0.0009995) return `${(seconds * 1e6).toFixed(0)} µs`;
  if (seconds < 0.9995) return `${rounded(seconds * 1e3)} ms`;
  if (seconds < 60) return `${rounded(seconds)} s`;
  if (seconds < 600) return minutes(Math.round(seconds));
  if (seconds < 6000) return `${(seconds / 60).toFixed(0)} min`;
  return seconds < 360000 ? `${(seconds / 3600).toFixed(0)} h` : `${(seconds / 86400).toFixed(0)} d`;
}

export const age = (seconds) => (isNumber(seconds) ? `${seconds < 1 ? "<1 s" : duration(Math.floor(seconds))} ago` : DASH);

// A round number at or above the value, for the top of a scale.
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((step) => step * power).find((top) => top >= value * 0.9999999);
}

export function roundUpBytes(value) {
  let unit = 1;
  while (value / unit >= 1000) unit *= 1024;
  return unit * roundUp(value / unit);
}
