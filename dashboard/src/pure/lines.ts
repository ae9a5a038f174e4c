export interface LineRange {
  from: number;
  to: number;
}

/** Break so many pieces, each so many characters wide, into lines of at most `room` characters; one piece at least. */
export function linesOf(widths: readonly number[], room: number): LineRange[] {
  const lines: LineRange[] = [];
  let from = 0;
  let used = 0;
  widths.forEach((width, at) => {
    if (at > from && used + width > room) {
      lines.push({ from, to: at });
      from = at;
      used = 0;
    }
    used += width;
  });
  if (widths.length) lines.push({ from, to: widths.length });
  return lines;
}
