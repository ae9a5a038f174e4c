/** The figure that colours a row's tokens, taken together: how it is spread, its mean and its ends. */

import { Group, Text } from "@mantine/core";
import { useMemo } from "react";

import { count, counted, decimal } from "../../pure/format.ts";
import { COLOURINGS, colourOf, valueOf, type Colouring, type TokenAt } from "../../pure/tokenRows.ts";
import { histogramOf, statisticsOf } from "../../pure/tokenStatistics.ts";

const PARTS = 32;
const PART = 5;
const HEIGHT = 24;

interface Props {
  tokens: readonly TokenAt[];
  range: [number, number];
  colouring: Colouring;
}

export function RowFigures({ tokens, range, colouring }: Props) {
  const values = useMemo(() => tokens.map((token) => valueOf(token, colouring)), [tokens, colouring]);
  const known = useMemo(() => statisticsOf(values), [values]);
  const parts = useMemo(() => histogramOf(values, range, PARTS), [values, range]);
  if (COLOURINGS[colouring].kind === "classes") {
    const marked = values.filter((value) => value).length;
    const all = values.filter((value) => value !== null).length;
    return (
      <Text size="xs" className="agl-number" data-testid="row-figures">
        {count(marked)} of {counted(all, "token")} {colouring === "mask" ? "trained" : "clipped"}
      </Text>
    );
  }
  if (!known) {
    return (
      <Text size="xs" c="dimmed" data-testid="row-figures">
        The algorithm did not record the {COLOURINGS[colouring].label.toLowerCase()} of these tokens.
      </Text>
    );
  }
  const most = Math.max(...parts);
  const format = (value: number): string => decimal(colouring === "ratio" ? Math.exp(value) : value);
  const [low, high] = range;
  return (
    <Group gap="sm" data-testid="row-figures">
      <svg
        width={PARTS * PART}
        height={HEIGHT}
        role="img"
        aria-label={`${COLOURINGS[colouring].label} of ${counted(known.count, "token")} from ${format(known.low)} to ${format(known.high)}`}
      >
        {parts.map((size, at) => {
          const tall = size ? Math.max(2, (HEIGHT * size) / most) : 0;
          return (
            <rect
              key={at}
              x={at * PART}
              y={HEIGHT - tall}
              width={PART - 1}
              height={tall}
              fill={colourOf(low + ((high - low) * (at + 0.5)) / PARTS, range, colouring) ?? "none"}
              stroke="var(--agl-neutral)"
              strokeWidth={0.5}
            />
          );
        })}
      </svg>
      <Text size="xs" className="agl-number">
        {counted(known.count, "token")} · {colouring === "ratio" ? "geometric mean" : "mean"} {format(known.mean)} ·
        median {format(known.median)} · {format(known.low)} to {format(known.high)}
      </Text>
    </Group>
  );
}
