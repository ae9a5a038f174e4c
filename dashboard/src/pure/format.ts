/** Numbers and times as people read them. Every number has its unit; a value that is not known is a dash. */

export const UNKNOWN = "–";

export function count(value: number | null | undefined): string {
  return value === null || value === undefined ? UNKNOWN : value.toLocaleString("en-US");
}

/** So many things by their name: `1 rollout`, `1,200 rollouts`. */
export function counted(value: number | null | undefined, name: string): string {
  return `${count(value)} ${name}${value === 1 ? "" : "s"}`;
}

/** The numbers along an axis, each with as many places as tell it from its neighbours. */
export function ticks(values: readonly number[]): string[] {
  const step = Math.abs((values[1] ?? 0) - (values[0] ?? 0));
  if (step === 0 || step >= 1) return values.map((value) => Number(value.toFixed(2)).toLocaleString("en-US"));
  const places = Math.ceil(-Math.log10(step)) + 1;
  return values.map((value) => {
    if (Math.abs(value) < step / 1000) return "0";
    return places > 5 ? String(Number(value.toPrecision(4)).toExponential()) : String(Number(value.toFixed(places)));
  });
}

/** The input of a task in words, of the beginning of its JSON: the first value stands without its name. */
export function inputWords(preview: string): string {
  if (!preview.startsWith("{")) return preview;
  const values = preview.replace(/^\{"(?:[^"\\]|\\.)*": /, "").replace(/\}$/, "");
  return values.replace(/"((?:[^"\\]|\\.)*)(?:"|\\?$)/g, (_, text: string) => spoken(text));
}

function spoken(text: string): string {
  try {
    return String(JSON.parse(`"${text}"`));
  } catch {
    return text; // an escape that was cut
  }
}

/** A reward, log-probability or the like: at most three places, never in exponents between 0.001 and 100,000. */
export function decimal(value: number | null | undefined, places = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 10 ** -places || size >= 100_000) return value.toExponential(Math.max(places - 1, 0));
  return String(Number(value.toFixed(places)));
}

export function percent(share: number | null | undefined, places = 1): string {
  return share === null || share === undefined || !Number.isFinite(share)
    ? UNKNOWN
    : `${(share * 100).toFixed(places)} %`;
}

export function pValue(value: number | null | undefined): string {
  if (value === null || value === undefined) return UNKNOWN;
  return value < 0.001 ? "p < 0.001" : `p = ${value.toFixed(3)}`;
}

/** A span of time: `840 ms`, `3.2 s`, `4 min 05 s`, `2 h 03 min`, `3 d 04 h`. */
export function duration(seconds: number | null | undefined): string {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return UNKNOWN;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  if (whole < 86_400) return `${Math.floor(whole / 3600)} h ${two(Math.floor((whole % 3600) / 60))} min`;
  return `${Math.floor(whole / 86_400)} d ${two(Math.floor((whole % 86_400) / 3600))} h`;
}

export function bytes(size: number | null | undefined): string {
  if (size === null || size === undefined) return UNKNOWN;
  if (size < 1000) return `${size} B`;
  const units = ["kB", "MB", "GB", "TB"];
  let value = size / 1000;
  let unit = 0;
  while (value >= 999.5 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

/** A moment, in the chosen time zone (an IANA name, or `local`). */
export function moment(seconds: number | null | undefined, zone = "local", withDate = true): string {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  const options: Intl.DateTimeFormatOptions = {
    hour: "2-digit",
    minute: "2-digit",
    second: "2-digit",
    hourCycle: "h23",
    ...(withDate ? { year: "numeric", month: "2-digit", day: "2-digit" } : {}),
    ...(zone === "local" ? {} : { timeZone: zone }),
  };
  return new Intl.DateTimeFormat("sv-SE", options).format(new Date(seconds * 1000));
}

/** A moment as ISO 8601 in UTC, for files; null if it is unknown. */
export function isoTime(seconds: number | null | undefined): string | null {
  return seconds === null || seconds === undefined ? null : new Date(seconds * 1000).toISOString();
}

/** How long ago, in words: `12 s ago`. */
export function ago(seconds: number | null | undefined, now: number): string {
  return seconds === null || seconds === undefined
    ? UNKNOWN
    : `${duration(Math.max(0, Math.floor(now - seconds)) || 0)} ago`;
}

function two(value: number): string {
  return String(value).padStart(2, "0");
}
