export interface LineRange {
  from: number;
  to: number;
}

/**
 * Break so many pieces, each so many characters wide, into lines of at most `room` characters; one piece at least.
 * A line also ends before each place of `breaks`.
 */
export function linesOf(widths: readonly number[], room: number, breaks: ReadonlySet<number> = new Set()): LineRange[] {
  const lines: LineRange[] = [];
  let from = 0;
  let used = 0;
  widths.forEach((width, at) => {
    if (at > from && (used + width > room || breaks.has(at))) {
      lines.push({ from, to: at });
      from = at;
      used = 0;
    }
    used += width;
  });
  if (widths.length) lines.push({ from, to: widths.length });
  return lines;
}
