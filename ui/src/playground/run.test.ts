import type { Session } from "agentflow-client";
import { expect, it, vi } from "vitest";
import { EXAMPLES } from "./examples";
import { ProgramRun } from "./run";

it("f37: a run that goes on after a pause has not run during the pause", () => {
  vi.useFakeTimers({ toFake: ["performance"] });
  const submit = (): never => {
    vi.advanceTimersByTime(2000);
    throw new Error("it is away");
  };
  const session = { capabilities: { roles: true }, submit } as unknown as Session;
  const run = new ProgramRun(EXAMPLES["essay_judge"]!, session);
  vi.advanceTimersByTime(60_000);
  run.goOn(session);
  expect([run.status.value, run.duration.value]).toEqual(["failed", 4]);
  vi.useRealTimers();
});
