/** A value as a tree: names and values one below the other, deeper ones folded until somebody asks. */

import { Button } from "@mantine/core";
import { useState } from "react";

import { named, visible } from "../pure/visible.ts";
import { LongText } from "./LongText.tsx";

const MOST = 100;

export function Tree({ value, depth = 0 }: { value: unknown; depth?: number }) {
  const [shown, setShown] = useState(MOST);
  if (typeof value !== "object" || value === null) return <Leaf value={value} />;
  const entries = Object.entries(value as Record<string, unknown>);
  if (!entries.length) return <span className="agl-dim">{Array.isArray(value) ? "empty list" : "nothing"}</span>;
  return (
    <ul className="agl-tree">
      {entries.slice(0, shown).map(([name, each]) => (
        <li key={name}>
          {isLeaf(each) ? (
            <>
              <span className="agl-dim">{named(name)}:</span> <Leaf value={each} />
            </>
          ) : (
            <details open={depth === 0}>
              <summary>
                <span className="agl-dim">{named(name)}</span> ({Object.keys(each as object).length})
              </summary>
              <Tree value={each} depth={depth + 1} />
            </details>
          )}
        </li>
      ))}
      {entries.length > shown ? (
        <li>
          <Button size="compact-xs" variant="subtle" onClick={() => setShown(shown + 10 * MOST)}>
            {entries.length - shown} more
          </Button>
        </li>
      ) : null}
    </ul>
  );
}

function isLeaf(value: unknown): boolean {
  return typeof value !== "object" || value === null || Object.keys(value).length === 0;
}

function Leaf({ value }: { value: unknown }) {
  if (typeof value === "string") {
    return value.length > 80 || value.includes("\n") ? (
      <LongText text={value} mono />
    ) : (
      <span className="agl-text">{visible(value)}</span>
    );
  }
  if (value === null || value === undefined) return <span className="agl-dim">none</span>;
  if (typeof value === "object")
    return <span className="agl-dim">{Array.isArray(value) ? "empty list" : "nothing"}</span>;
  return <span className="agl-number">{JSON.stringify(value)}</span>;
}
