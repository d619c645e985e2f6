// A reporter of node:test that writes, for each client, what was tested, and whether it passed. A suite is named
// after its client, and a test after its subject, with a variant in brackets.

export default async function* record(events) {
  const passed = {};
  const suites = [];
  for await (const { type, data } of events) {
    if (type === "test:start") suites[data.nesting] = data.name;
    if (!["test:pass", "test:fail"].includes(type) || data.details.type === "suite") continue;
    const done = (passed[suites[0]] ??= {});
    const [subject] = data.name.split("[");
    done[subject] = (done[subject] ?? true) && type === "test:pass";
  }
  yield `${JSON.stringify(passed, null, 1)}\n`;
}
