/** What changed between two texts, word by word. */

export interface Piece {
  kind: "same" | "added" | "removed";
  text: string;
}

const MOST = 4_000_000;

/** Longest common subsequence of words and spaces; texts too long for that differ as one piece in their middle. */
export function wordDiff(before: string, after: string): Piece[] {
  const old = words(before);
  const now = words(after);
  let start = 0;
  while (start < old.length && start < now.length && old[start] === now[start]) start += 1;
  let end = 0;
  while (end < old.length - start && end < now.length - start && old.at(-1 - end) === now.at(-1 - end)) end += 1;
  const a = old.slice(start, old.length - end);
  const b = now.slice(start, now.length - end);
  const pieces: Piece[] = [];
  const put = (kind: Piece["kind"], text: string): void => {
    const last = pieces.at(-1);
    if (!text) return;
    if (last?.kind === kind) last.text += text;
    else pieces.push({ kind, text });
  };
  put("same", old.slice(0, start).join(""));
  if (a.length * b.length > MOST) {
    put("removed", a.join(""));
    put("added", b.join(""));
  } else middle(a, b, put);
  put("same", end ? old.slice(-end).join("") : "");
  return pieces;
}

function middle(a: string[], b: string[], put: (kind: Piece["kind"], text: string) => void): void {
  const width = b.length + 1;
  const longest = new Uint32Array((a.length + 1) * width);
  const at = (i: number, j: number): number => longest[i * width + j] ?? 0;
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      longest[i * width + j] = a[i] === b[j] ? at(i + 1, j + 1) + 1 : Math.max(at(i + 1, j), at(i, j + 1));
    }
  }
  let i = 0;
  let j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      put("same", a[i] ?? "");
      i += 1;
      j += 1;
    } else if (i < a.length && (j >= b.length || at(i + 1, j) >= at(i, j + 1))) {
      put("removed", a[i] ?? "");
      i += 1;
    } else {
      put("added", b[j] ?? "");
      j += 1;
    }
  }
}

function words(text: string): string[] {
  return text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
}

const KEPT_SAME = 300;
const KEPT_OTHER = 5000;

/** The pieces of a long text without what stands between their ends, so that a change far down is seen at once. */
export function foldedPieces(pieces: readonly Piece[], most = 20_000): Piece[] {
  if (pieces.reduce((sum, { text }) => sum + text.length, 0) <= most) return [...pieces];
  return pieces.map(({ kind, text }) => {
    const kept = kind === "same" && pieces.length > 1 ? KEPT_SAME : KEPT_OTHER;
    const left = text.length - 2 * kept;
    if (left <= 0) return { kind, text };
    return {
      kind,
      text: `${text.slice(0, kept)}\n… ${left.toLocaleString("en-US")} characters not shown …\n${text.slice(-kept)}`,
    };
  });
}
