/** The first place at which lists differ: -1 if they are all the same; null if fewer than two have anything. */
export function firstDifference(lists: readonly (readonly number[])[]): { at: number } | null {
  const known = lists.filter((list) => list.length);
  const [first, ...others] = known;
  if (!first || !others.length) return null;
  const most = Math.max(...known.map((list) => list.length));
  for (let at = 0; at < most; at += 1) {
    if (others.some((list) => list[at] !== first[at])) return { at };
  }
  return { at: -1 };
}
