// A typed value that fills in: the schema's fields stand there from the start, each with its type.
import type { JsonNode } from "./partial_json";
import "./json.css";

type Schema = Record<string, unknown>;

export function JsonTree(props: { node: JsonNode | null; schema?: Schema | null }) {
  return (
    <div class="json-tree">
      <Value node={props.node} schema={props.schema ?? null} />
    </div>
  );
}

const CUT = "The text has more.";

function Value({ node, schema }: { node: JsonNode | null; schema: Schema | null }) {
  if (node?.kind === "array") {
    const items = schemaAt(schema, "items");
    return (
      <ol class="json-list">
        {node.items.map((item, index) => (
          <li key={index}>
            <Value node={item} schema={items} />
          </li>
        ))}
        {node.isCut && <li class="json-empty">{CUT}</li>}
        {node.items.length === 0 && !node.isCut && <li class="json-empty">{node.isDone ? "none" : "…"}</li>}
      </ol>
    );
  }
  if (node?.kind === "object" || (!node && schema?.["type"] === "object")) {
    const members = node?.kind === "object" ? node.members : [];
    const properties = schemaAt(schema, "properties") ?? {};
    const names = [...new Set([...Object.keys(properties), ...members.map((member) => member.name)])];
    return (
      <>
        <dl class="json-object">
          {names.map((name) => {
            const value = members.find((member) => member.name === name)?.value ?? null;
            const inner = schemaAt(properties, name);
            return (
              <div key={name} class={value ? "json-member" : "json-member is-pending"}>
                <dt>
                  <bdi>{name}</bdi> <span class="json-type">{typeOf(value, inner)}</span>
                </dt>
                <dd>
                  <Value node={value} schema={inner} />
                </dd>
              </div>
            );
          })}
        </dl>
        {node?.isCut && <p class="json-empty">{CUT}</p>}
      </>
    );
  }
  if (!node) return <span class="json-empty">…</span>;
  return (
    <span class={`json-${node.kind}${node.isDone ? "" : " is-growing"}`} dir="auto">
      {"text" in node ? node.text : ""}
    </span>
  );
}

function typeOf(node: JsonNode | null, schema: Schema | null): string {
  if (Array.isArray(schema?.["enum"])) return "one of";
  const named = schema?.["type"];
  return typeof named === "string" ? named : (node?.kind ?? "");
}

function schemaAt(schema: Schema | null, name: string): Schema | null {
  const found = schema?.[name];
  return typeof found === "object" && found !== null ? (found as Schema) : null;
}
