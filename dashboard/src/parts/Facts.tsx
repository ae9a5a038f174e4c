/** Names with their values, side by side. */

import type { ReactNode } from "react";

export function Facts({ facts }: { facts: [string, ReactNode][] }) {
  return (
    <dl className="agl-facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value ?? "–"}</dd>
        </div>
      ))}
    </dl>
  );
}
