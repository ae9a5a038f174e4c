/** The path of a small curve that fills a box; empty for fewer than two values. */
export function sparkPath(values: readonly (number | null)[], width: number, height: number): string {
  const known = values.flatMap((value, at) => (value === null || !Number.isFinite(value) ? [] : [{ at, value }]));
  if (known.length < 2) return "";
  const low = Math.min(...known.map(({ value }) => value));
  const high = Math.max(...known.map(({ value }) => value));
  const last = values.length - 1;
  return known
    .map(({ at, value }, place) => {
      const x = 1 + (at / last) * (width - 2);
      const y = high === low ? height / 2 : height - 1 - ((value - low) / (high - low)) * (height - 2);
      return `${place ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    })
    .join("");
}

/** At most so many values, each the mean of its neighbours, for a long run. */
export function thinned(values: readonly (number | null)[], most: number): (number | null)[] {
  if (values.length <= most) return [...values];
  const pace = values.length / most;
  return Array.from({ length: most }, (_, place) => {
    const part = values.slice(Math.floor(place * pace), Math.floor((place + 1) * pace));
    const known = part.filter((value): value is number => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  });
}
