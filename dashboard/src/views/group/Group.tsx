import { Title } from "@mantine/core";

export function Group() {
  return <Title order={1}>Group</Title>;
}
