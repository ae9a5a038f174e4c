/** All rollouts: filtered and sorted by the server, drawn only where one looks, live. */

import { Button, Group, Kbd, Modal, Progress, Stack, Table, Text, Title, UnstyledButton } from "@mantine/core";
import { useHotkeys } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";

import { summariesQuery } from "../../api/questions.ts";
import type { RolloutSummary } from "../../api/types.ts";
import { usePreferences } from "../../app/preferences.ts";
import { useAddress } from "../../app/useAddress.ts";
import { Empty, Failure, Loading } from "../../parts/States.tsx";
import { href, type SearchValues } from "../../pure/address.ts";
import { filterOf } from "../../pure/filters.ts";
import { count, counted } from "../../pure/format.ts";
import { carried } from "../../pure/place.ts";
import { chosenColumns, type Column } from "./columns.tsx";
import { exportRows, save, type Form } from "./exporting.ts";
import { FilterBar } from "./FilterBar.tsx";
import { orderOf } from "./order.ts";
import { useRows } from "./useRows.ts";
import { named } from "../../pure/visible.ts";

const HEIGHT = { compact: 28, comfortable: 36 };

export function Rollouts() {
  const [search, change] = useAddress();
  const { density } = usePreferences();
  const filter = useMemo(() => filterOf(search), [search]);
  const order = orderOf(search);
  const shown = chosenColumns(search.columns);
  const scroller = useRef<HTMLDivElement>(null);
  const textField = useRef<HTMLInputElement>(null);
  const [total, setTotal] = useState(0);
  const [at, setAt] = useState(0);
  const [helping, setHelping] = useState(false);
  const height = HEIGHT[density];
  const width = shown.reduce((sum, column) => sum + (column.width ?? 130), 0);
  const virtual = useVirtualizer({
    count: total,
    getScrollElement: () => scroller.current,
    estimateSize: () => height,
    overscan: 12,
  });
  const places = virtual.getVirtualItems();
  const [held, setHeld] = useState<number | null>(null);
  const {
    rows,
    total: newTotal,
    first,
  } = useRows(filter, order, places[0]?.index ?? 0, places.at(-1)?.index ?? 0, held);
  if (newTotal !== undefined && newTotal !== total) setTotal(newTotal);
  const list = JSON.stringify([filter, order]);
  useEffect(() => setHeld(null), [list]);
  const byStart = order.sort_by === "start_time" && order.sort_order === "desc";
  const latest = useQuery({
    ...summariesQuery(filter, { sort_by: "start_time", sort_order: "desc" }, 0, 1),
    enabled: held === null && !(byStart && rows.has(0)),
  });
  const newest = (byStart ? rows.get(0) : latest.data?.items[0])?.start_time;
  const hold = (): void => {
    if (newest !== undefined) setHeld((known) => known ?? newest + 1e-6);
  };
  const onScroll = (event: React.UIEvent<HTMLDivElement>): void => {
    if (event.currentTarget.scrollTop > 2 * height) hold();
  };
  const toNew = (): void => {
    setHeld(null);
    setAt(0);
    virtual.scrollToIndex(0);
  };

  const move = (to: number): void => {
    const next = Math.max(0, Math.min(total - 1, to));
    hold();
    setAt(next);
    virtual.scrollToIndex(next);
  };
  const open = (): void => {
    const row = rows.get(at);
    if (row) window.location.hash = linkOf(row, search, at);
  };
  useHotkeys([
    ["j", () => move(at + 1)],
    ["k", () => move(at - 1)],
    ["shift+J", () => move(at + 20)],
    ["shift+K", () => move(at - 20)],
    ["Enter", (event) => onLink(event) || open(), { preventDefault: false }],
    ["/", () => textField.current?.focus()],
    ["shift+?", () => setHelping(true)],
  ]);

  return (
    <Stack gap="sm" className="agl-fill">
      <Group justify="space-between" align="baseline">
        <Title order={1} size="h2">
          Rollouts
        </Title>
        <Group gap="sm">
          <Text size="sm" role="status" data-total={newTotal}>
            {newTotal === undefined ? "" : counted(newTotal, "rollout")}
          </Text>
          {held === null ? null : <NewRows filter={filter} since={held} show={toNew} />}
          <Exporting shown={shown} filter={filter} order={order} />
          <Button size="xs" variant="subtle" onClick={() => setHelping(true)}>
            Keyboard shortcuts
          </Button>
        </Group>
      </Group>
      <FilterBar search={search} change={change} textRef={textField} />
      {first?.isError ? (
        <Failure error={first.error} retry={() => void first.refetch()} what="Rollouts" />
      ) : newTotal === undefined ? (
        <Loading what="rollouts" />
      ) : total === 0 ? (
        <Empty title={Object.keys(filter).length ? "No rollouts match these filters" : "No rollouts yet"} />
      ) : (
        <div
          ref={scroller}
          className="agl-grid"
          role="grid"
          aria-label="Rollouts"
          aria-rowcount={total + 1}
          aria-colcount={shown.length}
          tabIndex={0}
          onScroll={onScroll}
        >
          <div role="row" aria-rowindex={1} className="agl-grid-row agl-grid-head" style={{ minWidth: width }}>
            {shown.map((column) => (
              <HeadCell key={column.id} column={column} order={order} change={change} />
            ))}
          </div>
          <div role="rowgroup" className="agl-grid-body" style={{ height: virtual.getTotalSize(), minWidth: width }}>
            {places.map(({ index, start }) => {
              const row = rows.get(index);
              return (
                <div
                  key={index}
                  role="row"
                  aria-rowindex={index + 2}
                  aria-selected={index === at}
                  className="agl-grid-row"
                  data-index={index}
                  data-rollout={row?.rollout_id}
                  style={{ height, transform: `translateY(${start}px)` }}
                  onClick={() => setAt(index)}
                >
                  {shown.map((column) => (
                    <Cell key={column.id} column={column} row={row} link={row && linkOf(row, search, index)} />
                  ))}
                </div>
              );
            })}
          </div>
        </div>
      )}
      <Keys opened={helping} close={() => setHelping(false)} />
    </Stack>
  );
}

/** How many rollouts have begun since the list stands still, and the way to them. */
function NewRows({ filter, since, show }: { filter: ReturnType<typeof filterOf>; since: number; show: () => void }) {
  const fresh = useQuery(
    summariesQuery({ ...filter, started_after: since }, { sort_by: "start_time", sort_order: "desc" }, 0, 1),
  );
  const number = fresh.data?.total ?? 0;
  return number ? (
    <Button size="xs" variant="light" onClick={show} data-new={number}>
      {count(number)} new
    </Button>
  ) : null;
}

function linkOf(row: RolloutSummary, search: SearchValues, at: number): string {
  return href(["rollouts", row.rollout_id], carried(search, at));
}

function sizeOf(column: Column): React.CSSProperties {
  return column.width ? { width: column.width, flexShrink: 0 } : { flex: 1, minWidth: 130 };
}

function Cell({ column, row, link }: { column: Column; row: RolloutSummary | undefined; link: string | undefined }) {
  return (
    <div
      role="gridcell"
      className={`agl-grid-cell${column.right ? " agl-right agl-number" : ""}`}
      style={sizeOf(column)}
    >
      {row === undefined ? (
        <span className="agl-waiting" />
      ) : column.id === "id" ? (
        <a href={link} className="agl-link">
          {row.rollout_id}
        </a>
      ) : (
        shownIn(column, row)
      )}
    </div>
  );
}

/** What a cell shows; texts are those of others. */
function shownIn(column: Column, row: RolloutSummary): React.ReactNode {
  const shown = column.show(row);
  return typeof shown === "string" ? named(shown) : shown;
}

interface HeadProps {
  column: Column;
  order: { sort_by: string; sort_order: "asc" | "desc" };
  change: (values: Record<string, string | undefined>) => void;
}

function HeadCell({ column, order, change }: HeadProps) {
  const sorted = column.sort === order.sort_by;
  const next = sorted && order.sort_order === "desc" ? "asc" : "desc";
  return (
    <div
      role="columnheader"
      aria-sort={sorted ? (order.sort_order === "asc" ? "ascending" : "descending") : undefined}
      className={`agl-grid-cell${column.right ? " agl-right" : ""}`}
      style={sizeOf(column)}
    >
      {column.sort ? (
        <UnstyledButton
          fz="sm"
          fw={600}
          onClick={() => change({ sort: column.sort, order: next })}
          title={`Sort by ${column.label.toLowerCase()}`}
        >
          {column.label} {sorted ? (order.sort_order === "asc" ? "▲" : "▼") : ""}
        </UnstyledButton>
      ) : (
        column.label
      )}
    </div>
  );
}

interface ExportingProps {
  shown: Column[];
  filter: ReturnType<typeof filterOf>;
  order: { sort_by: string; sort_order: "asc" | "desc" };
}

function Exporting({ shown, filter, order }: ExportingProps) {
  const stop = useRef<AbortController | null>(null);
  const [state, setState] = useState<{ done: number; total: number } | null>(null);
  const [failure, setFailure] = useState<string | null>(null);
  const [written, setWritten] = useState("");
  const run = async (form: Form): Promise<void> => {
    stop.current = new AbortController();
    setFailure(null);
    setWritten("");
    setState({ done: 0, total: 0 });
    try {
      const tell = (done: number, total: number): void => setState({ done, total });
      const found = await exportRows(form, shown, filter, order, tell, stop.current.signal);
      save(found.file, `rollouts.${form}`);
      const left = found.total > found.rows ? `the first ${count(found.rows)} of ` : "";
      setWritten(`${left}${counted(found.total, "rollout")} exported`);
    } catch (error) {
      if (!(error instanceof DOMException)) setFailure(error instanceof Error ? error.message : String(error));
    } finally {
      setState(null);
    }
  };
  if (state) {
    return (
      <Group gap="xs">
        <Progress value={state.total ? (100 * state.done) / state.total : 0} w={80} aria-label="Export" />
        <Button size="xs" variant="default" onClick={() => stop.current?.abort()}>
          Cancel
        </Button>
      </Group>
    );
  }
  return (
    <Group gap={4}>
      <Text size="xs" c="dimmed" role="status">
        {written}
      </Text>
      {failure ? (
        <Text size="xs" role="alert">
          {failure}
        </Text>
      ) : null}
      <Button size="xs" variant="default" onClick={() => void run("csv")}>
        Export CSV
      </Button>
      <Button size="xs" variant="default" onClick={() => void run("jsonl")}>
        Export JSON Lines
      </Button>
    </Group>
  );
}

const keys: [string, string][] = [
  ["j / k", "next, previous rollout"],
  ["J / K", "20 rollouts down, up"],
  ["Enter", "open the rollout"],
  ["/", "go to the input filter"],
  ["?", "show these shortcuts"],
];

function Keys({ opened, close }: { opened: boolean; close: () => void }) {
  return (
    <Modal opened={opened} onClose={close} title="Keyboard shortcuts">
      <Table>
        <Table.Tbody>
          {keys.map(([key, does]) => (
            <Table.Tr key={key}>
              <Table.Td>
                <Kbd>{key}</Kbd>
              </Table.Td>
              <Table.Td>{does}</Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
    </Modal>
  );
}

/** A link or a button that has the focus takes the key for itself. */
function onLink(event: KeyboardEvent): boolean {
  return event.target instanceof Element && event.target.closest("a, button, summary, [role=option]") !== null;
}
