/** Names with their values, side by side. */

import type { ReactNode } from "react";
import { named } from "../pure/visible.ts";

export function Facts({ facts }: { facts: [string, ReactNode][] }) {
  return (
    <dl className="agl-facts">
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{named(name)}</dt>
          <dd>{typeof value === "string" ? named(value, 500) : (value ?? "–")}</dd>
        </div>
      ))}
    </dl>
  );
}
