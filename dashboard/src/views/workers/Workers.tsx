import { Title } from "@mantine/core";

export function Workers() {
  return <Title order={1}>Workers</Title>;
}
