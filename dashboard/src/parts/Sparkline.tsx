/** A curve in one line of a table. */

import { decimal } from "../pure/format.ts";
import { sparkPath } from "../pure/spark.ts";

const WIDTH = 96;
const HEIGHT = 22;

export function Sparkline({ values, label }: { values: (number | null)[]; label: string }) {
  const path = sparkPath(values, WIDTH, HEIGHT);
  const last = values.findLast((value) => value !== null) ?? null;
  if (!path) return <>–</>;
  return (
    <svg width={WIDTH} height={HEIGHT} role="img" aria-label={`${label}, now ${decimal(last)}`} className="agl-spark">
      <path d={path} />
    </svg>
  );
}
