/** The filters of the list; each stands in the address. */

import { ActionIcon, Box, Button, Group, Menu, MultiSelect, NumberInput, Select, TextInput } from "@mantine/core";
import { useDebouncedCallback, useDisclosure } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import { useState, type Ref } from "react";

import { runsQuery } from "../../api/questions.ts";
import type { SearchValues } from "../../pure/address.ts";
import { FILTERS, MODES, OUTCOMES, STATUSES } from "../../pure/filters.ts";
import { chosenColumns, columns } from "./columns.tsx";
import { named } from "../../pure/visible.ts";

interface Props {
  search: SearchValues;
  change: (values: SearchValues) => void;
  textRef: Ref<HTMLInputElement>;
}

export function FilterBar({ search, change, textRef }: Props) {
  const runs = useQuery(runsQuery());
  const active = FILTERS.filter((name) => search[name]).length;
  const list = (name: string, label: string, data: readonly string[], width: number) => (
    <MultiSelect
      label={label}
      size="xs"
      w={width}
      data={data.map((value) => ({ value, label: value.replaceAll("_", " ") }))}
      value={search[name]?.split(",").filter(Boolean) ?? []}
      onChange={(values) => change({ [name]: values.join(",") || undefined })}
      clearable
      hidePickedOptions
    />
  );
  const [open, { toggle }] = useDisclosure(false);
  return (
    <>
      <Button size="xs" variant="default" onClick={toggle} aria-expanded={open} hiddenFrom="sm">
        Filters {active ? `(${active})` : ""}
      </Button>
      <Box visibleFrom={open ? undefined : "sm"}>{bar()}</Box>
    </>
  );

  function bar() {
    return (
      <Group gap="xs" align="flex-end" role="search" aria-label="Filters of rollouts">
        <Select
          label="Run"
          size="xs"
          w={170}
          searchable
          clearable
          data={[
            ...new Set([...(runs.data?.items.map((run) => run.run_id) ?? []), ...(search.run ? [search.run] : [])]),
          ].map((value) => ({ value, label: named(value) }))}
          value={search.run ?? null}
          onChange={(run) => change({ run: run ?? undefined })}
        />
        <Typed name="text" label="Input contains" width={170} search={search} change={change} inputRef={textRef} />
        {list("status", "Status", STATUSES, 150)}
        {list("mode", "Mode", MODES, 150)}
        {list("outcome", "Outcome", OUTCOMES, 160)}
        <Typed name="step_from" label="Step from" width={78} search={search} change={change} numeric />
        <Typed name="step_to" label="to" width={70} search={search} change={change} numeric />
        <Typed name="reward_from" label="Reward from" width={88} search={search} change={change} numeric />
        <Typed name="reward_to" label="to" width={70} search={search} change={change} numeric />
        <Typed name="worker" label="Worker" width={120} search={search} change={change} />
        <Typed name="resources" label="Resources" width={120} search={search} change={change} />
        <Typed name="version" label="Version" width={70} search={search} change={change} numeric />
        <Typed name="id" label="Rollout id" width={120} search={search} change={change} />
        <Menu closeOnItemClick={false} position="bottom-end">
          <Menu.Target>
            <ActionIcon variant="default" size={30} aria-label="Choose columns">
              ▥
            </ActionIcon>
          </Menu.Target>
          <Menu.Dropdown>
            <Menu.Label>Columns</Menu.Label>
            {columns.map((column) => {
              const shown = chosenColumns(search.columns).map((each) => each.id);
              const on = shown.includes(column.id);
              const next = on ? shown.filter((id) => id !== column.id) : [...shown, column.id];
              return (
                <Menu.CheckboxItem key={column.id} checked={on} onChange={() => change({ columns: next.join(",") })}>
                  {column.label}
                </Menu.CheckboxItem>
              );
            })}
          </Menu.Dropdown>
        </Menu>
        <Button
          size="xs"
          variant="subtle"
          disabled={!active}
          onClick={() => change(Object.fromEntries(FILTERS.map((name) => [name, undefined])))}
        >
          Clear {active || ""} {active === 1 ? "filter" : "filters"}
        </Button>
      </Group>
    );
  }
}

interface TypedProps {
  name: string;
  label: string;
  width: number;
  search: SearchValues;
  change: (values: SearchValues) => void;
  numeric?: boolean;
  inputRef?: Ref<HTMLInputElement>;
}

/** A field whose value goes into the address a moment after the last key. */
function Typed({ name, label, width, search, change, numeric, inputRef }: TypedProps) {
  const given = search[name] ?? "";
  const [value, setValue] = useState(given);
  const [taken, setTaken] = useState(given);
  if (taken !== given) {
    setTaken(given); // the address was changed elsewhere
    setValue(given);
  }
  const later = useDebouncedCallback((text: string) => change({ [name]: text || undefined }), 250);
  const put = (text: string): void => {
    setValue(text);
    later(text);
  };
  return numeric ? (
    <NumberInput
      label={label}
      aria-label={name.replaceAll("_", " ")}
      size="xs"
      w={width}
      hideControls
      value={value}
      onChange={(next) => put(String(next))}
    />
  ) : (
    <TextInput
      ref={inputRef}
      label={label}
      size="xs"
      w={width}
      value={value}
      onChange={(event) => put(event.currentTarget.value)}
    />
  );
}
