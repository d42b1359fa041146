// Numbers, times and sizes as text.

const UNITS = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];

const plain = new Intl.NumberFormat("en", { maximumFractionDigits: 6 });

/** "1.500e+7" as "1.5e7". */
const short = (text) => text.replace(/\.?0*e\+?/, "e");

/** A number with four significant digits, which fit next to a curve. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return short(value.toExponential(3));
  return plain.format(Number(value.toPrecision(4)));
}

export const count = (value) =>
  value === null || value === undefined ? "–" : plain.format(Math.round(value));

/** Return different names, the most frequent one first. */
export const frequent = (names) => [...Map.groupBy(names, (name) => name).values()]
  .toSorted((one, other) => other.length - one.length).map(([name]) => name);

/** "1 lane", "8 lanes". */
export const several = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;

/** A number on an axis: short, and as exact as ticks require. */
export function tick(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) return short(value.toExponential(9));
  const [unit, sign] = size >= 1e6 ? [1e6, "M"] : size >= 1e4 ? [1e3, "k"] : [1, ""];
  return `${Number((value / unit).toPrecision(10))}${sign}`;
}

/** Seconds in the two largest units that matter: "3 h 20 min", "45 s", "12 ms". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || seconds < 0) return "–"; // clocks that differ
  if (seconds < 1) return seconds === 0 ? "0 s" : `${Number((seconds * 1000).toPrecision(3))} ms`;
  if (seconds < 10) return `${Number(seconds.toPrecision(2))} s`;
  const first = UNITS.findIndex(([, length]) => seconds >= length);
  const [unit, length] = UNITS[first];
  const whole = Math.floor(seconds / length);
  const next = UNITS[first + 1];
  const rest = next ? Math.round((seconds - whole * length) / next[1]) : 0;
  if (rest && whole < 10) return `${whole} ${unit} ${rest} ${next[0]}`;
  return `${Math.round(seconds / length)} ${unit}`;
}

/** The same for an axis: "1:30:00", "2:05". */
export function clockSpan(seconds) {
  if (seconds < 0) return "–"; // clocks that differ
  const rest = Math.round(seconds);
  const [hours, minutes, left] = [Math.floor(rest / 3600), Math.floor(rest / 60) % 60, rest % 60];
  const two = (value) => String(value).padStart(2, "0");
  const isExact = seconds < 10 && !Number.isInteger(seconds);
  if (isExact) return Number(seconds.toPrecision(3)).toString();
  return hours ? `${hours}:${two(minutes)}:${two(left)}` : `${minutes}:${two(left)}`;
}

export function bytes(size) {
  for (const unit of ["B", "KB", "MB", "GB"]) {
    if (size < 1000) return `${Number(size.toPrecision(3))} ${unit}`;
    size /= 1000;
  }
  return `${Number(size.toPrecision(3))} TB`;
}

const TIME = { hour: "2-digit", minute: "2-digit" };
const DAY_AND_TIME = { day: "numeric", month: "short", ...TIME, second: "2-digit" };
const timeOnly = new Intl.DateTimeFormat("en-GB", TIME);
const dayAndTime = new Intl.DateTimeFormat("en-GB", DAY_AND_TIME);

export const moment = (time) => (time ? dayAndTime.format(time * 1000) : "–");

/** A time of day, with the date if it is more than 20 hours away. */
export function near(time, now) {
  const format = Math.abs(time - now) < 20 * 3600 ? timeOnly : dayAndTime;
  return format.format(time * 1000);
}

export function ago(time, now) {
  if (!time) return "never";
  const seconds = Math.max(0, now - time);
  return seconds < 2 ? "just now" : `${duration(Math.round(seconds))} ago`;
}

/** Split "val/loss" into group and name. Without a slash, the group is empty. */
export function splitName(name) {
  const slash = name.indexOf("/");
  if (slash <= 0 || slash === name.length - 1) return ["", name];
  return [name.slice(0, slash), name.slice(slash + 1)];
}

/** Return the best value of a scalar; the highest if its name does not say what is better. */
export const bestOf = ({ goal, lowest, highest }) => (goal === "lowest" ? lowest : highest);
