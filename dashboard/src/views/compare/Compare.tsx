import { Title } from "@mantine/core";

export function Compare() {
  return <Title order={1}>Compare</Title>;
}
