package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"sort"
	"sync"
	"time"

	"github.com/vmihailenco/msgpack/v5"
)

const (
	waitLimit     = 60 * time.Second
	inFlightLimit = 64 << 20 // bytes of a connection's appends that are not answered: above it nothing more is read
	helloWithin   = 5 * time.Second
)

// server answers the requests of processes at a socket.
type server struct {
	sidecar *sidecar

	mu      sync.Mutex
	clients map[string]int             // open connections of each client
	created map[string]map[string]bool // by client: the temporary channels that it created
}

func newServer(s *sidecar) *server {
	return &server{sidecar: s, clients: map[string]int{}, created: map[string]map[string]bool{}}
}

// connection is one connection. Requests are taken in their order, so appends reach the log in it; what waits is
// answered by a goroutine of its own.
type connection struct {
	server *server
	socket net.Conn
	client string // 16 bytes, or none of a process that only reads
	ctx    context.Context

	sending sync.Mutex
	mu      sync.Mutex
	waiting map[uint64]context.CancelFunc
	flying  int // bytes of appends
	landed  *sync.Cond
}

func (s *server) serve(listener net.Listener) error {
	for {
		socket, err := listener.Accept()
		if err != nil {
			return err
		}
		go s.connected(socket)
	}
}

func (s *server) connected(socket net.Conn) {
	ctx, cancel := context.WithCancel(context.Background())
	c := &connection{server: s, socket: socket, ctx: ctx, waiting: map[uint64]context.CancelFunc{}}
	c.landed = sync.NewCond(&c.mu)
	defer func() {
		cancel()
		_ = socket.Close()
	}()
	source := bufio.NewReaderSize(socket, 128<<10)
	if err := c.greet(source); err != nil {
		return
	}
	defer s.left(c.client)
	for {
		received, err := readFrame(source)
		if err != nil {
			c.refuse(0, err)
			return
		}
		asked, err := received.request()
		if err != nil {
			c.refuse(0, err)
			return
		}
		if err := c.handle(asked, received); err != nil {
			c.fail(asked.seq, err)
		}
	}
}

func (c *connection) greet(source *bufio.Reader) error {
	_ = c.socket.SetReadDeadline(time.Now().Add(helloWithin))
	received, err := readFrame(source)
	if err != nil {
		return err
	}
	asked, err := received.request()
	if err != nil || asked.method != "hello" || len(asked.arguments) < 2 {
		return c.refuse(0, invalid("say hello first"))
	}
	if version, _ := natural(asked.arguments[0]); version != protocolVersion {
		message := fmt.Sprintf("this sidecar speaks version %d of the protocol, not %d", protocolVersion, version)
		return c.refuse(asked.seq, failure("Unsupported", message, map[string]any{"capability": "protocol", "found": version, "supported": protocolVersion}))
	}
	if id, isBytes := asked.arguments[1].([]byte); isBytes {
		c.client = string(id)
	}
	c.server.joined(c.client)
	_ = c.socket.SetReadDeadline(time.Time{})
	c.answer(asked.seq, map[string]any{"boot": c.server.sidecar.boot, "frame_bytes": frameLimit})
	return nil
}

// ---- answering

func (c *connection) send(frame []byte) {
	c.sending.Lock()
	defer c.sending.Unlock()
	if _, err := c.socket.Write(frame); err != nil {
		_ = c.socket.Close()
	}
}

func (c *connection) answer(seq uint64, result any) {
	if seq > 0 {
		c.send(encodeFrame([]any{seq, "ok", result}, nil))
	}
}

func (c *connection) fail(seq uint64, err error) {
	if seq > 0 {
		c.send(encodeFrame([]any{seq, "error", translated(err, "").wire()}, nil))
	}
}

// refuse answers with the error, where it is one of Tidewal, and ends the connection.
func (c *connection) refuse(seq uint64, err error) error {
	var known *tidewalError
	if errors.As(err, &known) {
		c.send(encodeFrame([]any{seq, "error", known.wire()}, nil))
	}
	return err
}

// later answers with what `work` returns, unless the request is cancelled before.
func (c *connection) later(seq uint64, work func(ctx context.Context) ([]byte, error)) {
	ctx, cancel := context.WithCancel(c.ctx)
	c.mu.Lock()
	c.waiting[seq] = cancel
	c.mu.Unlock()
	go func() {
		defer func() {
			cancel()
			c.mu.Lock()
			delete(c.waiting, seq)
			c.mu.Unlock()
		}()
		answer, err := work(ctx)
		switch {
		case ctx.Err() != nil: // cancelled, or the connection has ended
		case err != nil:
			c.fail(seq, err)
		default:
			c.send(answer)
		}
	}()
}

// ---- requests

func (c *connection) handle(asked *request, received *frame) error {
	switch asked.method {
	case "append", "appends":
		return c.append(asked, received)
	case "cancel":
		if len(asked.arguments) == 1 {
			if seq, isNumber := natural(asked.arguments[0]); isNumber {
				c.mu.Lock()
				if cancel := c.waiting[seq]; cancel != nil {
					cancel()
				}
				c.mu.Unlock()
			}
		}
		c.answer(asked.seq, nil)
		return nil
	case "beat":
		c.answer(asked.seq, nil)
		return nil
	case "channels":
		c.answer(asked.seq, c.server.sidecar.names())
		return nil
	case "read":
		return c.read(asked)
	}
	work, err := c.change(asked)
	if err != nil {
		return err
	}
	c.later(asked.seq, func(ctx context.Context) ([]byte, error) {
		result, err := work(ctx)
		if err != nil {
			return nil, err
		}
		return encodeFrame([]any{asked.seq, "ok", result}, nil), nil
	})
	return nil
}

func (a *request) text(at int) string {
	if at < len(a.arguments) {
		if text, isText := a.arguments[at].(string); isText {
			return text
		}
	}
	return ""
}

// change is what a request about one channel asks for, but for appends and reading.
func (c *connection) change(asked *request) (func(ctx context.Context) (any, error), error) {
	name, s := asked.text(0), c.server.sidecar
	with := func(count int, work func(ctx context.Context, found channel) (any, error)) (func(ctx context.Context) (any, error), error) {
		if len(asked.arguments) != count {
			return nil, invalid(asked.method + " has other arguments")
		}
		return func(ctx context.Context) (any, error) {
			found, err := s.find(ctx, name)
			if err != nil {
				return nil, err
			}
			result, err := work(ctx, found)
			if err != nil {
				return nil, translated(err, name)
			}
			return result, nil
		}, nil
	}
	switch asked.method {
	case "describe":
		return with(1, func(ctx context.Context, found channel) (any, error) {
			first, latest, err := found.describe(ctx)
			return []any{found.policyOf(), wireLatest(first), wireLatest(latest)}, err
		})
	case "latest_id":
		return with(1, func(ctx context.Context, found channel) (any, error) {
			_, latest, err := found.describe(ctx)
			return wireLatest(latest), err
		})
	case "id_at":
		return with(2, func(ctx context.Context, found channel) (any, error) {
			timestamp, isNumber := natural(asked.arguments[1])
			if !isNumber {
				return nil, invalid("a timestamp is a number")
			}
			id, err := found.idAt(ctx, timestamp)
			return wireLatest(id), err
		})
	case "truncate":
		return with(2, func(ctx context.Context, found channel) (any, error) {
			id, isID := idOf(asked.arguments[1])
			if !isID {
				return nil, invalid("an id has 8 bytes")
			}
			return nil, found.truncate(ctx, id)
		})
	case "hold":
		return with(3, func(ctx context.Context, found channel) (any, error) {
			id, isID := idOf(asked.arguments[2])
			if !isID && asked.arguments[2] != nil {
				return nil, invalid("an id has 8 bytes")
			}
			return nil, found.hold(ctx, asked.text(1), id)
		})
	case "create":
		if len(asked.arguments) != 2 {
			return nil, invalid("create has other arguments")
		}
		return func(ctx context.Context) (any, error) { return nil, c.create(ctx, name, asked.arguments[1]) }, nil
	case "drop":
		return func(ctx context.Context) (any, error) { return nil, s.drop(ctx, name) }, nil
	}
	return nil, invalid("the sidecar does not know " + asked.method)
}

func (c *connection) create(ctx context.Context, name string, wire any) error {
	var wanted policy
	encoded, err := msgpack.Marshal(wire)
	if err == nil {
		err = msgpack.Unmarshal(encoded, &wanted)
	}
	if err != nil {
		return invalid("the request names no policy: " + err.Error())
	}
	if wanted.Temporary && c.client == "" {
		return invalid("a client that creates a temporary channel needs an id")
	}
	if err := c.server.sidecar.create(ctx, name, wanted); err != nil {
		return err
	}
	if wanted.Temporary {
		c.server.noteCreated(c.client, name)
	}
	return nil
}

func (c *connection) read(asked *request) error {
	if len(asked.arguments) != 4 {
		return invalid("read has other arguments")
	}
	from, err := decodeStart(asked.arguments[1])
	if err != nil {
		return err
	}
	upto, limited := idOf(asked.arguments[2])
	seconds, _ := asked.arguments[3].(float64)
	wait := time.Duration(seconds * float64(time.Second))
	name := asked.text(0)
	found, err := c.server.sidecar.find(c.ctx, name)
	if err != nil {
		return err
	}
	if from.kind == "latest" { // fixed here, since appends behind it on the connection are to be read
		position, err := found.begin(c.ctx, from)
		if err != nil {
			return translated(err, name)
		}
		from = start{kind: "next", id: position}
	}
	c.later(asked.seq, func(ctx context.Context) ([]byte, error) {
		position, err := found.begin(ctx, from)
		if err != nil {
			return nil, translated(err, name)
		}
		records, latest, err := found.read(ctx, position, min(wait, waitLimit))
		if err != nil {
			return nil, translated(err, name)
		}
		if limited {
			records = records[:sort.Search(len(records), func(i int) bool { return records[i].id > upto })]
		}
		if len(records) > 0 {
			next := wireID(records[len(records)-1].id + 1)
			return encodeFrame([]any{asked.seq, "ok", []any{nil, next, wireLatest(latest)}}, records), nil
		}
		return encodeFrame([]any{asked.seq, "ok", []any{[]any{}, wireID(position), wireLatest(latest)}}, nil), nil
	})
	return nil
}

func decodeStart(wire any) (start, error) {
	items, isList := wire.([]any)
	if isList && len(items) > 0 {
		kind, _ := items[0].(string)
		switch {
		case (kind == "earliest" || kind == "latest") && len(items) == 1:
			return start{kind: kind}, nil
		case kind == "id" && len(items) == 3:
			raw, isBytes := items[1].([]byte)
			inclusive, isBool := items[2].(bool)
			if isBytes && isBool {
				id, _ := idOf(raw)
				return start{kind: kind, id: id, raw: raw, inclusive: inclusive}, nil
			}
		case kind == "time" && len(items) == 2:
			if timestamp, isNumber := natural(items[1]); isNumber {
				return start{kind: kind, timestamp: timestamp}, nil
			}
		case kind == "next" && len(items) == 2:
			if id, isID := idOf(items[1]); isID {
				return start{kind: kind, id: id}, nil
			}
		}
	}
	return start{}, invalid("the request names no start that the protocol knows")
}

// append hands the records of a request to their channels. `appends` carries several appends of one record each.
func (c *connection) append(asked *request, received *frame) error {
	if len(asked.arguments) != 3 {
		return invalid("append has other arguments")
	}
	names, _ := asked.arguments[2].([]any)
	appends, err := received.appends(names)
	if err != nil {
		return err
	}
	if asked.method == "append" {
		c.submit(asked.seq, appends)
		return nil
	}
	if len(appends) == 0 || len(appends) > appendsLimit {
		return invalid("appends of no request of the protocol")
	}
	for i := range appends {
		c.submit(asked.seq+uint64(i), appends[i:i+1])
	}
	return nil
}

// separate are the ids one by one.
func separate(ids []byte) [][]byte {
	each := make([][]byte, 0, len(ids)/8)
	for ; len(ids) > 0; ids = ids[8:] {
		each = append(each, ids[:8])
	}
	return each
}

func (c *connection) submit(seq uint64, appends []append_) {
	parts, size, err := c.parts(appends)
	if err != nil {
		c.fail(seq, err)
		return
	}
	if len(parts) == 0 {
		c.answer(seq, []any{})
		return
	}
	c.take(size)
	whole := &submission{ids: make([]byte, 8*len(appends)), open: len(parts)}
	whole.answer = func(ids []byte, err *tidewalError) {
		if err != nil {
			c.fail(seq, err)
		} else {
			c.answer(seq, separate(ids))
		}
		c.land(size)
	}
	for found, each := range parts {
		each.of = whole
		found.submit(each)
	}
}

// parts are the records by channel; nothing is taken where one channel is missing, or one record is too large.
func (c *connection) parts(appends []append_) (map[channel]*part, int, error) {
	parts := map[channel]*part{}
	var into *part // of the channel that this record and the last one are for
	size, limit := 0, int64(0)
	for i, each := range appends {
		if i == 0 || each.channel != appends[i-1].channel {
			found, err := c.server.sidecar.find(c.ctx, each.channel)
			if err != nil {
				return nil, 0, err
			}
			if c.server.sidecar.isSuperseded() {
				return nil, 0, fenced(each.channel)
			}
			if into = parts[found]; into == nil {
				into = &part{}
				parts[found] = into
			}
			limit = found.policyOf().MaxMessageBytes
		}
		if int64(len(each.payload)) > limit {
			message := fmt.Sprintf("a message of %d bytes for %s is over its limit of %d", len(each.payload), each.channel, limit)
			return nil, 0, failure("MessageTooLarge", message, map[string]any{"size": len(each.payload), "limit": limit})
		}
		into.records = append(into.records, record{timestamp: each.timestamp, payload: each.payload})
		into.places = append(into.places, i)
		size += len(each.payload) + recordOverhead
	}
	return parts, size, nil
}

// take waits until there is room for so many bytes of appends.
func (c *connection) take(size int) {
	c.mu.Lock()
	for c.flying > inFlightLimit {
		c.landed.Wait()
	}
	c.flying += size
	c.mu.Unlock()
}

func (c *connection) land(size int) {
	c.mu.Lock()
	c.flying -= size
	c.landed.Broadcast()
	c.mu.Unlock()
}

// ---- temporary channels

func (s *server) joined(client string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients[client]++
}

func (s *server) noteCreated(client, name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.created[client] == nil {
		s.created[client] = map[string]bool{}
	}
	s.created[client][name] = true
}

// left drops the temporary channels that no process has any more which created them.
func (s *server) left(client string) {
	for _, name := range s.orphans(client) {
		if err := s.sidecar.drop(context.Background(), name); err != nil {
			log.Printf("a temporary channel stays until the sidecar ends: %v", err)
		}
	}
}

// orphans are the channels that nobody needs once a connection of the client has ended.
func (s *server) orphans(client string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.clients[client]--; s.clients[client] > 0 {
		return nil
	}
	delete(s.clients, client)
	mine := s.created[client]
	delete(s.created, client)
	var names []string
	for name := range mine {
		if !s.isCreated(name) {
			names = append(names, name)
		}
	}
	return names
}

func (s *server) isCreated(name string) bool {
	for _, names := range s.created {
		if names[name] {
			return true
		}
	}
	return false
}
