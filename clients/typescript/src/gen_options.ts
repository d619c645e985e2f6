// The options of a gen, and the op that they make.

import { BadArgument } from "./errors.js";
import type { Constraint, GenOp, GenParams } from "./protocol.js";

type CamelCase<Name extends string> = Name extends `${infer Head}_${infer Tail}`
  ? `${Head}${Capitalize<CamelCase<Tail>>}`
  : Name;

/** The sampling parameters of the protocol, with names such as `maxTokens` for `max_tokens`. */
export type SamplingOptions = {
  [Name in keyof GenParams as CamelCase<Name>]?: GenParams[Name] | undefined;
};

/** Options of `gen`. One of `schema`, `regex`, `choices`, `grammar` and `constraint` may constrain the text. */
export interface GenOptions extends Omit<SamplingOptions, "stop"> {
  /** Texts that end the text, and are not part of it. */
  stop?: string | readonly string[] | undefined;
  /** The text is JSON that is valid under this JSON schema. */
  schema?: object | undefined;
  /** The whole text matches this pattern. */
  regex?: string | undefined;
  /** The text is one of these, sampled token by token; `select` compares their likelihoods instead. */
  choices?: readonly string[] | undefined;
  /** The text follows this grammar in Lark's notation. */
  grammar?: string | undefined;
  /** Any constraint of the protocol. */
  constraint?: Constraint | undefined;
  /** Between the parts of a JSON value; by default `compact`. */
  whitespace?: Constraint["whitespace"] | undefined;
  /** False: text that the constraint forces is sampled all the same. */
  jumpForward?: boolean | undefined;
  /** The value is a reply that may call tools; see `Variable.reply`. */
  reply?: boolean | undefined;
  /** A W3C `traceparent`. */
  trace?: string | undefined;
}

// A model may continue a string or a list for ever; longer ones must be allowed by the schema.
const STRING_CHARS = 4_000;
const LIST_ITEMS = 200;

/** The fields of a `gen` beside its numbers. */
export function genFields(options: GenOptions): Omit<GenOp, "op" | "state" | "var" | "name"> {
  const {
    schema,
    regex,
    choices,
    grammar,
    constraint,
    whitespace,
    jumpForward,
    reply,
    trace,
    stop,
    ...sampling
  } = options;
  const kinds = Object.entries({ schema, regex, choices, grammar, constraint }).filter(
    ([, value]) => value !== undefined,
  );
  if (kinds.length > 1) {
    throw new BadArgument(`gen: one constraint at most, not ${kinds.map(([name]) => name).join(" and ")}`);
  }
  const params: Record<string, unknown> = {};
  for (const [name, value] of Object.entries(sampling)) {
    if (value !== undefined) params[snakeCase(name)] = value;
  }
  if (stop !== undefined) params["stop"] = typeof stop === "string" ? [stop] : stop;
  const fields: Omit<GenOp, "op" | "state" | "var" | "name"> = { params: params as GenParams };
  let made: Constraint | undefined = constraint;
  if (schema !== undefined) made = schemaConstraint(schema);
  if (regex !== undefined) made = { kind: "regex", source: regex };
  if (choices !== undefined) made = { kind: "choices", choices: [...choices] };
  if (grammar !== undefined) made = { kind: "grammar", source: grammar };
  if (made) {
    if (whitespace !== undefined) made = { ...made, whitespace };
    if (jumpForward !== undefined) made = { ...made, jump_forward: jumpForward };
    fields.constraint = made;
  }
  if (reply) fields.reply = true;
  if (trace) fields.trace = trace;
  return fields;
}

function schemaConstraint(schema: object): Constraint {
  return {
    kind: "schema",
    source: JSON.stringify(schema),
    string_chars: largest(schema, STRING_CHARS, ["maxLength", "minLength"]),
    list_items: largest(schema, LIST_ITEMS, ["maxItems", "minItems", "maxProperties"], ["properties", "prefixItems"]),
  };
}

/** The largest number below these keys, or of members below those, and at least `least`. */
function largest(value: unknown, least: number, keys: readonly string[], lists: readonly string[] = []): number {
  if (typeof value !== "object" || value === null) return least;
  let found = least;
  for (const [name, part] of Object.entries(value)) {
    if (keys.includes(name) && typeof part === "number") found = Math.max(found, Math.floor(part));
    if (lists.includes(name) && typeof part === "object" && part) {
      found = Math.max(found, Object.keys(part).length);
    }
    found = largest(part, found, keys, lists);
  }
  return found;
}

function snakeCase(name: string): string {
  return name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
}
