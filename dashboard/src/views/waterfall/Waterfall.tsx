/** The spans of an attempt as a tree over time. */

import { Badge, Button, Group, Stack, Text, TextInput } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useMemo, useRef, useState, type KeyboardEvent } from "react";

import { treeQuery } from "../../api/questions.ts";
import type { SpanTree } from "../../api/types.ts";
import { useAddress } from "../../app/useAddress.ts";
import { Answer, Empty } from "../../parts/States.tsx";
import { useNow } from "../../parts/useNow.ts";
import { count, duration } from "../../pure/format.ts";
import { visible } from "../../pure/visible.ts";
import { criticalPath, kindOf, rowsOf, timesOf, type SpanKind, type SpanRow } from "../../pure/waterfall.ts";
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
          <Empty title="No span of this attempt has been recorded" />
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
  const rows = useMemo(() => {
    const found = rowsOf(tree.roots, closed);
    return text ? all.filter(({ span }) => span.name.toLowerCase().includes(text)) : found;
  }, [tree, closed, text, all]);
  const [low, high] = timesOf(all, now);
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
      ArrowRight: () => row && (closed.has(row.span.span_id) ? toggle(row.span.span_id) : row.below && choose(chosen + 1)),
      ArrowLeft: () => row && (!closed.has(row.span.span_id) && row.below ? toggle(row.span.span_id) : choose(row.parent)),
      Escape: () => change({ span: undefined }),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
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
        <Button size="xs" variant="default" onClick={() => setClosed(new Set(all.filter((row) => row.below).map(({ span }) => span.span_id)))}>
          Collapse all
        </Button>
        <Button size="xs" variant="default" onClick={() => setClosed(new Set())}>
          Expand all
        </Button>
        <Text size="sm" c="dimmed">
          {count(all.length)} spans over {duration(high - low)}
          {failed ? `, ${failed} failed` : ""}
          {pending ? ", some still run" : ""}
        </Text>
        <Group gap={6}>
          {kinds.map(([kind, name]) => (
            <Badge key={kind} variant="default" tt="none" size="sm" className={`agl-kind-${kind}`}>
              {letters[kind]} {name}
            </Badge>
          ))}
        </Group>
      </Group>
      {tree.problems.map((problem) => (
        <Text key={problem} size="xs" c="dimmed">
          Left out of the tree: {problem}
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
                flat={Boolean(text)}
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
        <SpanDetails rolloutId={rolloutId} attemptId={attemptId} spanId={search.span} close={() => change({ span: undefined })} />
      ) : null}
    </Stack>
  );
}

interface RowProps {
  row: SpanRow;
  index: number;
  top: number;
  low: number;
  high: number;
  now: number;
  flat: boolean;
  open: boolean | undefined;
  chosen: boolean;
  critical: boolean;
  choose: () => void;
  toggle: () => void;
}

function Row({ row, index, top, low, high, now, flat, open, chosen, critical, choose, toggle }: RowProps) {
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
      <div role="gridcell" className={`agl-grid-cell agl-span-name${failed ? " agl-failed" : ""}`} style={{ paddingLeft: 8 + (flat ? 0 : Math.min(depth, 24) * 14) }}>
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
        {visible(span.name)}
        {span.agent ? ` · ${visible(span.agent)}` : ""}
        {span.reward === null ? "" : ` = ${span.reward}`}
      </div>
      <div role="gridcell" className="agl-span-time">
        {span.start_time === null ? null : (
          <span
            className={`agl-bar agl-kind-${kind}${failed ? " agl-failed" : ""}${span.end_time === null ? " agl-pending" : ""}${critical ? " agl-critical" : ""}`}
            style={{ left: share(span.start_time), width: `max(2px, ${(100 * (end - span.start_time)) / (high - low)}%)` }}
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
