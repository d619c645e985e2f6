// The client of agentflow servers. Names of the protocol's data are the protocol's own (`usage.cached_tokens`);
// options, methods and properties are in camel case.

export { AgentflowError } from "./agentflow_error.js";
export { countCodePoints, utf16Spans } from "./code_points.js";
export type { Status } from "./connection.js";
export type { EmbedOptions } from "./embeddings.js";
export * from "./errors.js";
export type { CancelOptions } from "./failure.js";
export type { GenOptions, SamplingOptions } from "./gen_options.js";
export { Graph, type Run, type StateOptions, type SubmitOptions } from "./graph.js";
export { image, type Image, type ImageSource } from "./image.js";
export type {
  CalledTool,
  Capabilities,
  Constraint,
  ErrorInfo,
  LiveGraph,
  LiveMedium,
  LiveNode,
  LiveState,
  Message,
  Op,
  Option,
  GenParams,
  PassedOver,
  Question,
  ServerEvent,
  Stats,
  StepRecord,
  TokenLogprob,
  ToolChoice,
  ToolSpec,
  TreeDelta,
  TreeNode,
  Usage,
  WatchedRequest,
} from "./protocol.js";
export { ReplyReader, ReplySoFar, readReply, type Reply, type ReplyPiece } from "./reply.js";
export { connect, type ConnectOptions, type Session } from "./session.js";
export type { Part, State, TextPart } from "./state.js";
export type { ChatMessage } from "./transcript.js";
export type { WebSocketConstructor, WebSocketLike } from "./transport.js";
export type { ChangeListener, Reference, Span, Variable } from "./variable.js";
export { GraphsView, type GraphView, mergeWatched, TreeView, type TreeViewNode, type Watched, type WatchOptions } from "./watch.js";
