/** A chart over training steps: lines with intervals or stacked bars, drawn by uPlot, with its values as a table. */

import { useMantineColorScheme, useComputedColorScheme, VisuallyHidden } from "@mantine/core";
import { useElementSize } from "@mantine/hooks";
import { useEffect, useRef } from "react";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { series as colors, type Colour } from "../app/palette.ts";
import { decimal, ticks } from "../pure/format.ts";
import { named } from "../pure/visible.ts";

export interface Series {
  label: string;
  values: (number | null)[];
  /** Bounds of an interval around each value. */
  low?: (number | null)[];
  high?: (number | null)[];
  color?: Colour;
  dash?: number[];
}

export interface Mark {
  step: number;
  label: string;
}

interface Props {
  title: string;
  /** Steps, ascending. */
  steps: number[];
  series: Series[];
  kind?: "line" | "stack";
  unit?: string;
  height?: number;
  range?: [number, number];
  marks?: Mark[];
  format?: (value: number | null) => string;
  onStep?: (step: number) => void;
}

export function Chart(given: Props) {
  const props = { ...given, series: given.series.map((each) => ({ ...each, label: named(each.label, 60) })) };
  const { title, steps, series, kind = "line", height = 180, unit = "", onStep } = props;
  const format =
    props.format ?? ((value: number | null) => `${decimal(value)}${unit && value !== null ? ` ${unit}` : ""}`);
  const { ref, width } = useElementSize();
  const scheme = useComputedColorScheme("light");
  useMantineColorScheme();
  const holder = useRef<HTMLDivElement>(null);

  useEffect(() => {
    if (!holder.current || width < 40) return;
    const plot = new uPlot(options(props, width, height, scheme, format), data(props), holder.current);
    const over = plot.over;
    const click = (): void => {
      const at = plot.cursor.idx;
      const step = at === null || at === undefined ? undefined : steps[at];
      if (step !== undefined) onStep?.(step);
    };
    over.addEventListener("click", click);
    return () => {
      over.removeEventListener("click", click);
      plot.destroy();
    };
  });

  return (
    <figure className="agl-chart" data-chart={title} data-kind={kind}>
      <figcaption>{title}</figcaption>
      <div ref={ref}>
        <div ref={holder} aria-hidden className={onStep ? "agl-chart-click" : undefined} />
      </div>
      <VisuallyHidden>
        <table>
          <caption>{title}</caption>
          <thead>
            <tr>
              <th scope="col">step</th>
              {series.map((each) => (
                <th scope="col" key={each.label}>
                  {each.label}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {thin(steps.length).map((at) => (
              <tr key={steps[at]}>
                <th scope="row">{steps[at]}</th>
                {series.map((each) => (
                  <td key={each.label}>{format(each.values[at] ?? null)}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </VisuallyHidden>
    </figure>
  );
}

/** At most 200 places out of so many: what a screen reader is given of a long run. */
function thin(count: number): number[] {
  const pace = Math.max(1, Math.ceil(count / 200));
  return Array.from({ length: Math.ceil(count / pace) }, (_, place) => place * pace);
}

function colorOf(each: Series, place: number, scheme: string): string {
  return (each.color ?? colors[place % colors.length] ?? colors[0])?.[scheme === "dark" ? 1 : 0] ?? "#888";
}

/** The directions of the stripes by which parts of a stack differ beside their colour; the first has none. */
const STRIPES = ["", "45deg", "135deg", "0deg", "90deg"] as const;

/** What stands in the legend for a part of a stack. */
function swatch(color: string, place: number, page: string): string {
  const angle = STRIPES[place % STRIPES.length];
  return angle ? `repeating-linear-gradient(${angle}, ${color} 0 3px, ${page} 3px 4.5px)` : color;
}

/** The same as a fill of bars. */
function striped(color: string, place: number, page: string): string | CanvasPattern {
  const angle = STRIPES[place % STRIPES.length];
  const tile = document.createElement("canvas");
  const size = 8 * (window.devicePixelRatio || 1);
  tile.width = tile.height = size;
  const ctx = tile.getContext("2d");
  if (!angle || !ctx) return color;
  ctx.fillStyle = color;
  ctx.fillRect(0, 0, size, size);
  ctx.strokeStyle = page;
  ctx.lineWidth = size / 5;
  ctx.beginPath();
  for (const at of [-size, 0, size]) {
    const [from, to] = {
      "45deg": [
        [at, 0],
        [at + size, size],
      ],
      "135deg": [
        [at + size, 0],
        [at, size],
      ],
      "0deg": [
        [0, size / 2],
        [size, size / 2],
      ],
      "90deg": [
        [size / 2, 0],
        [size / 2, size],
      ],
    }[angle] as [[number, number], [number, number]];
    ctx.moveTo(...from);
    ctx.lineTo(...to);
  }
  ctx.stroke();
  return ctx.createPattern(tile, "repeat") ?? color;
}

function data({ steps, series, kind }: Props): uPlot.AlignedData {
  if (kind === "stack") {
    const sums = steps.map(() => 0);
    const stacked = series.map((each) =>
      each.values.map((value, at) => {
        sums[at] = (sums[at] ?? 0) + (value ?? 0);
        return sums[at] ?? 0;
      }),
    );
    return [steps, ...stacked.reverse()];
  }
  return [
    steps,
    ...series.flatMap((each) => (each.low && each.high ? [each.values, each.low, each.high] : [each.values])),
  ];
}

function options(
  { steps, series, kind = "line", range, marks = [] }: Props,
  width: number,
  height: number,
  scheme: string,
  format: (value: number | null) => string,
): uPlot.Options {
  const page = scheme === "dark" ? "#242424" : "#ffffff";
  const ink = scheme === "dark" ? "#c9c9c9" : "#495057";
  const grid = { stroke: scheme === "dark" ? "#3a3a3a" : "#e9ecef", width: 1 };
  const axis = { stroke: ink, grid, ticks: grid, font: "12px system-ui", size: 44 };
  const bars = uPlot.paths.bars?.({ size: [0.8, 40], align: 0 });
  const shown: uPlot.Series[] = [{ label: "step" }];
  const bands: uPlot.Band[] = [];
  if (kind === "stack") {
    [...series].reverse().forEach((each, back) => {
      const place = series.length - 1 - back;
      shown.push({
        label: each.label,
        stroke: page,
        fill: striped(colorOf(each, place, scheme), place, page),
        width: 1,
        paths: bars,
        points: { show: false },
        value: (_, __, ___, at) => (at === null ? "–" : format(each.values[at] ?? null)),
      });
    });
  } else {
    series.forEach((each, place) => {
      const first = shown.length;
      shown.push({
        label: each.label,
        stroke: colorOf(each, place, scheme),
        width: 2,
        dash: each.dash,
        spanGaps: true,
        points: { show: steps.length < 60, size: 5 },
        value: (_, __, ___, at) => {
          if (at === null) return "–";
          const low = each.low?.[at];
          const high = each.high?.[at];
          const value = format(each.values[at] ?? null);
          return low === null || low === undefined || high === null || high === undefined
            ? value
            : `${value} [${format(low)}, ${format(high)}]`;
        },
      });
      if (each.low && each.high) {
        for (const _ of [0, 1])
          shown.push({ show: true, width: 0, points: { show: false }, class: "agl-hidden", spanGaps: true });
        bands.push({ series: [first + 2, first + 1], fill: `${colorOf(each, place, scheme)}2b` });
      }
    });
  }
  return {
    width,
    height,
    series: shown,
    bands,
    scales: {
      x: {
        time: false,
        range: (_, low, high) =>
          low === high
            ? [low - 1, high + 1]
            : [low - (kind === "stack" ? 0.5 : 0), high + (kind === "stack" ? 0.5 : 0)],
      },
      y: {
        range: range
          ? () => range
          : kind === "stack"
            ? (_, __, high) => [0, (high || 1) * 1.05]
            : (_, low, high) => (low === 0 && high === 0 ? [0, 1] : uPlot.rangeNum(low, high, 0.1, true)),
      },
    },
    axes: [
      { ...axis, size: 28, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000], space: 48 },
      {
        ...axis,
        size: (_, labels) => Math.max(52, 22 + 7 * Math.max(0, ...(labels ?? []).map((label) => label.length))),
        values: (_, splits) => ticks(splits),
      },
    ],
    legend: {
      live: true,
      ...(kind === "stack"
        ? {
            markers: {
              width: 0,
              fill: (_: uPlot, shown: number) => {
                const place = series.length - shown;
                const each = series[place];
                return each ? swatch(colorOf(each, place, scheme), place, page) : page;
              },
            },
          }
        : {}),
    },
    cursor: { drag: { x: true, y: false }, points: { size: 6 } },
    hooks: {
      draw: [
        (plot) => {
          const { ctx } = plot;
          ctx.save();
          ctx.strokeStyle = ink;
          ctx.fillStyle = ink;
          ctx.setLineDash([3, 3]);
          for (const mark of marks) {
            const x = Math.round(plot.valToPos(mark.step, "x", true));
            ctx.beginPath();
            ctx.moveTo(x, plot.bbox.top);
            ctx.lineTo(x, plot.bbox.top + plot.bbox.height);
            ctx.stroke();
            ctx.fillText("▲", x - 5, plot.bbox.top + plot.bbox.height - 2);
          }
          ctx.restore();
        },
      ],
    },
  };
}
