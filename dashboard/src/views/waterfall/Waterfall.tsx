/** The spans of an attempt as a tree over time. */

import { ActionIcon, Button, Group, Stack, Text, TextInput } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState, type KeyboardEvent } from "react";

import { treeQuery } from "../../api/questions.ts";
import type { SpanTree } from "../../api/types.ts";
import { useAddress } from "../../app/useAddress.ts";
import { Answer, Empty } from "../../parts/States.tsx";
import { useNow } from "../../parts/useNow.ts";
import { counted, duration } from "../../pure/format.ts";
import { named } from "../../pure/visible.ts";
import {
  criticalPath,
  gapsOf,
  kindOf,
  moved,
  rowsOf,
  timesOf,
  zoomed,
  type SpanKind,
  type SpanRow,
} from "../../pure/waterfall.ts";
import { SpanDetails } from "./SpanDetails.tsx";

const LINE = 26;
const MOST_HEIGHT = 560;
const letters: Record<SpanKind, string> = { call: "C", reward: "R", tool: "T", agent: "A", virtual: "?", other: "·" };
const kinds: [SpanKind, string][] = [
  ["call", "model call"],
  ["reward", "reward"],
  ["tool", "tool"],
  ["agent", "agent"],
  ["other", "other"],
];

interface Props {
  rolloutId: string;
  attemptId: string;
}

export function Waterfall({ rolloutId, attemptId }: Props) {
  const tree = useQuery(treeQuery(rolloutId, attemptId));
  return (
    <Answer query={tree} what="Spans">
      {(known) =>
        known.roots.length ? (
          <Tree tree={known} rolloutId={rolloutId} attemptId={attemptId} />
        ) : (
          <Empty title="No spans recorded in this attempt" />
        )
      }
    </Answer>
  );
}

function Tree({ tree, rolloutId, attemptId }: Props & { tree: SpanTree }) {
  const [search, change] = useAddress();
  const [closed, setClosed] = useState<ReadonlySet<string>>(new Set());
  const scroller = useRef<HTMLDivElement>(null);
  const all = useMemo(() => rowsOf(tree.roots, new Set()), [tree]);
  const pending = all.some(({ span }) => span.end_time === null);
  const now = useNow(pending ? 1000 : 0);
  const text = (search.find ?? "").toLowerCase();
  const wanted = search.kind ?? "";
  const rows = useMemo(() => {
    const found = rowsOf(tree.roots, closed);
    const kept = wanted.split(",");
    return text || wanted
      ? all.filter(({ span }) => span.name.toLowerCase().includes(text) && (!wanted || kept.includes(kindOf(span))))
      : found;
  }, [tree, closed, text, wanted, all]);
  const whole = useMemo(() => timesOf(all, now), [all, now]);
  const [part, setPart] = useState<[number, number] | null>(null);
  const [low, high] = part ?? whole;
  const gaps = useMemo(() => gapsOf(all, whole[0], whole[1], now), [all, whole, now]);
  const zoom = (factor: number): void =>
    setPart(factor > 1 && part === null ? null : zoomed([low, high], factor, whole));
  const pan = (share: number): void => setPart((known) => (known ? moved(known, share, whole) : known));
  const path = useMemo(() => criticalPath(all), [all]);
  const chosen = rows.findIndex(({ span }) => span.span_id === search.span);
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => LINE,
    overscan: 12,
  });
  const toggle = (id: string): void => {
    const next = new Set(closed);
    if (!next.delete(id)) next.add(id);
    setClosed(next);
  };
  const choose = (at: number): void => {
    const row = rows[Math.max(0, Math.min(rows.length - 1, at))];
    if (!row) return;
    change({ span: row.span.span_id });
    virtual.scrollToIndex(rows.indexOf(row), { align: "auto" });
  };
  const onKey = (event: KeyboardEvent): void => {
    const row = rows[chosen];
    const keys: Record<string, () => void> = {
      ArrowDown: () => choose(chosen + 1),
      ArrowUp: () => choose(chosen - 1),
      Home: () => choose(0),
      End: () => choose(rows.length - 1),
      ArrowRight: () =>
        row && (closed.has(row.span.span_id) ? toggle(row.span.span_id) : row.below && choose(chosen + 1)),
      ArrowLeft: () =>
        row && (!closed.has(row.span.span_id) && row.below ? toggle(row.span.span_id) : choose(row.parent)),
      Escape: () => (part ? setPart(null) : change({ span: undefined })),
      "+": () => zoom(0.5),
      "-": () => zoom(2),
      "[": () => pan(-0.25),
      "]": () => pan(0.25),
      z: () => row?.span.start_time != null && setPart(around(row.span.start_time, row.span.end_time ?? now, whole)),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  const wheel = useRef<(event: WheelEvent) => void>(() => undefined);
  wheel.current = (event) => {
    if (!event.ctrlKey && !event.shiftKey) return; // scrolling stays scrolling
    event.preventDefault();
    if (event.ctrlKey) zoom(event.deltaY > 0 ? 1.25 : 0.8);
    else pan(event.deltaY > 0 ? 0.1 : -0.1);
  };
  useEffect(() => {
    const area = scroller.current;
    const turn = (event: WheelEvent): void => wheel.current(event);
    area?.addEventListener("wheel", turn, { passive: false });
    return () => area?.removeEventListener("wheel", turn);
  }, []);
  const failed = all.filter(({ span }) => span.status_code === "ERROR").length;
  return (
    <Stack gap="xs">
      <Group gap="sm" align="flex-end">
        <TextInput
          label="Find by name"
          size="xs"
          value={search.find ?? ""}
          onChange={(event) => change({ find: event.currentTarget.value || undefined })}
        />
        <Button
          size="xs"
          variant="default"
          onClick={() => setClosed(new Set(all.filter((row) => row.below).map(({ span }) => span.span_id)))}
        >
          Collapse all
        </Button>
        <Button size="xs" variant="default" onClick={() => setClosed(new Set())}>
          Expand all
        </Button>
        <Text size="sm" c="dimmed">
          {counted(all.length, "span")} over {duration(whole[1] - whole[0])}
          {failed ? `, ${failed} failed` : ""}
          {pending ? ", some are running" : ""}
          {gaps.length ? `; nothing ran for ${duration(gaps.reduce((sum, [from, to]) => sum + to - from, 0))}` : ""}
        </Text>
      </Group>
      <Group gap="sm" justify="space-between">
        <Group gap={6} role="group" aria-label="Kinds of spans">
          {kinds.map(([kind, name]) => {
            const kept = wanted.split(",").filter(Boolean);
            const on = kept.includes(kind);
            const next = on ? kept.filter((each) => each !== kind) : [...kept, kind];
            return (
              <Button
                key={kind}
                size="compact-xs"
                variant={on ? "filled" : "default"}
                color="dark"
                aria-pressed={on}
                className={`agl-kind-${kind} agl-kind-choice`}
                onClick={() => change({ kind: next.join(",") || undefined })}
              >
                {letters[kind]} {name}
              </Button>
            );
          })}
        </Group>
        <Group gap={4} role="group" aria-label="Time range">
          <Text size="xs" className="agl-number" data-testid="part">
            {part ? `${duration(low - whole[0])} to ${duration(high - whole[0])}` : "full time range"}
          </Text>
          <ActionIcon
            size="sm"
            variant="default"
            aria-label="Zoom in"
            title="Zoom in (+, Ctrl and wheel)"
            onClick={() => zoom(0.5)}
          >
            +
          </ActionIcon>
          <ActionIcon
            size="sm"
            variant="default"
            aria-label="Zoom out"
            title="Zoom out (-)"
            disabled={!part}
            onClick={() => zoom(2)}
          >
            −
          </ActionIcon>
          <ActionIcon
            size="sm"
            variant="default"
            aria-label="Earlier"
            title="Earlier ([, Shift and wheel)"
            disabled={!part}
            onClick={() => pan(-0.25)}
          >
            ◂
          </ActionIcon>
          <ActionIcon
            size="sm"
            variant="default"
            aria-label="Later"
            title="Later (])"
            disabled={!part}
            onClick={() => pan(0.25)}
          >
            ▸
          </ActionIcon>
          <Button size="compact-xs" variant="default" disabled={!part} onClick={() => setPart(null)}>
            Reset zoom
          </Button>
        </Group>
      </Group>
      {tree.problems.map((problem) => (
        <Text key={problem} size="xs" c="dimmed">
          Tree problem: {problem}
        </Text>
      ))}
      <div
        ref={scroller}
        className="agl-grid"
        role="treegrid"
        aria-label="Spans"
        aria-rowcount={rows.length}
        tabIndex={0}
        onKeyDown={onKey}
        style={{ height: Math.min(MOST_HEIGHT, rows.length * LINE + 4), flex: "none", minHeight: 0 }}
      >
        <div style={{ height: virtual.getTotalSize(), position: "relative", minWidth: 560 }}>
          {virtual.getVirtualItems().map(({ index, start }) => {
            const row = rows[index];
            return row ? (
              <Row
                key={row.span.span_id}
                row={row}
                index={index}
                top={start}
                low={low}
                high={high}
                now={now}
                gaps={gaps}
                flat={Boolean(text || wanted)}
                open={row.below ? !closed.has(row.span.span_id) : undefined}
                chosen={index === chosen}
                critical={path.has(row.span.span_id)}
                choose={() => choose(index)}
                toggle={() => toggle(row.span.span_id)}
              />
            ) : null;
          })}
        </div>
      </div>
      {search.span && !search.span.startsWith("virtual") ? (
        <SpanDetails
          rolloutId={rolloutId}
          attemptId={attemptId}
          spanId={search.span}
          close={() => change({ span: undefined })}
        />
      ) : null}
    </Stack>
  );
}

/** A span with a tenth of its length on both sides. */
function around(from: number, to: number, whole: [number, number]): [number, number] {
  return zoomed([from, Math.max(to, from + 1e-6)], 1.2, whole);
}

interface RowProps {
  row: SpanRow;
  index: number;
  top: number;
  low: number;
  high: number;
  now: number;
  gaps: [number, number][];
  flat: boolean;
  open: boolean | undefined;
  chosen: boolean;
  critical: boolean;
  choose: () => void;
  toggle: () => void;
}

function Row({ row, index, top, low, high, now, gaps, flat, open, chosen, critical, choose, toggle }: RowProps) {
  const { span, depth, place, siblings } = row;
  const kind = kindOf(span);
  const failed = span.status_code === "ERROR";
  const end = span.end_time ?? now;
  const share = (at: number): string => `${(100 * (at - low)) / (high - low)}%`;
  const seconds = span.start_time === null ? null : end - span.start_time;
  return (
    <div
      role="row"
      aria-level={depth + 1}
      aria-posinset={place}
      aria-setsize={siblings}
      aria-expanded={open}
      aria-selected={chosen}
      aria-rowindex={index + 1}
      className="agl-grid-row agl-span"
      data-span={span.span_id}
      style={{ height: LINE, transform: `translateY(${top}px)`, position: "absolute", top: 0 }}
      onClick={choose}
    >
      <div
        role="gridcell"
        className={`agl-grid-cell agl-span-name${failed ? " agl-failed" : ""}`}
        style={{ paddingLeft: 8 + (flat ? 0 : Math.min(depth, 24) * 14) }}
      >
        {open === undefined || flat ? (
          <span className="agl-twist" />
        ) : (
          <button
            type="button"
            tabIndex={-1}
            className="agl-twist"
            aria-label={open ? "Collapse" : "Expand"}
            onClick={(event) => {
              event.stopPropagation();
              toggle();
            }}
          >
            {open ? "▾" : "▸"}
          </button>
        )}
        <span className={`agl-kind agl-kind-${kind}`}>{letters[kind]}</span> {failed ? "✕ " : ""}
        {named(span.name)}
        {span.agent ? ` · ${named(span.agent, 60)}` : ""}
        {span.reward === null ? "" : ` = ${span.reward}`}
      </div>
      <div role="gridcell" className="agl-span-time">
        {gaps.map(([from, to]) => (
          <span
            key={from}
            aria-hidden
            className="agl-gap"
            style={{ left: share(from), width: `${(100 * (to - from)) / (high - low)}%` }}
          />
        ))}
        {span.start_time === null ? null : (
          <span
            className={`agl-bar agl-kind-${kind}${failed ? " agl-failed" : ""}${span.end_time === null ? " agl-pending" : ""}${critical ? " agl-critical" : ""}`}
            style={{
              left: share(span.start_time),
              width: `max(2px, ${(100 * (end - span.start_time)) / (high - low)}%)`,
            }}
          />
        )}
      </div>
      <div role="gridcell" className="agl-grid-cell agl-right agl-number agl-span-seconds">
        {span.end_time === null && span.start_time !== null ? "runs " : ""}
        {duration(seconds)}
      </div>
    </div>
  );
}
