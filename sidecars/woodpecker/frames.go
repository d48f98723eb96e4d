package main

import (
	"bufio"
	"encoding/binary"
	"io"
	"reflect"

	"github.com/vmihailenco/msgpack/v5"
)

// Frames as adapters/rocksmq/protocol.py describes them: a header of three numbers, the head in msgpack, rows, payloads.
const (
	protocolVersion = 3
	headerBytes     = 12
	rowBytes        = 24
	headLimit       = 256 << 10
	frameLimit      = 32 << 20 // of rows and payloads in a request
	answerBytes     = 4 << 20
	appendsLimit    = 1024
)

type frame struct {
	head     []byte
	rows     int
	body     []byte // rows and payloads
	payloads []byte
}

func readFrame(source *bufio.Reader) (*frame, error) {
	var header [headerBytes]byte
	if _, err := io.ReadFull(source, header[:]); err != nil {
		return nil, err
	}
	head, rows, size := binary.BigEndian.Uint32(header[:]), binary.BigEndian.Uint32(header[4:]), binary.BigEndian.Uint32(header[8:])
	body := uint64(rows)*rowBytes + uint64(size)
	if head > headLimit || body > frameLimit {
		return nil, failure("BadRecord", "a request is over the limits of the protocol", map[string]any{"reason": "size"})
	}
	whole := make([]byte, uint64(head)+body)
	if _, err := io.ReadFull(source, whole); err != nil {
		return nil, err
	}
	rowsEnd := uint64(head) + uint64(rows)*rowBytes
	return &frame{whole[:head], int(rows), whole[head:rowsEnd], whole[rowsEnd:]}, nil
}

// request is the message in a frame's head.
type request struct {
	seq       uint64
	method    string
	arguments []any
}

func (f *frame) request() (*request, error) {
	var message any
	if err := msgpack.Unmarshal(f.head, &message); err != nil {
		return nil, failure("BadRecord", "no frame of this protocol: "+err.Error(), map[string]any{"reason": "frame"})
	}
	items, isList := message.([]any)
	if !isList || len(items) < 2 {
		return nil, invalid("the request does not fit the protocol")
	}
	seq, isNumber := natural(items[0])
	method, isText := items[1].(string)
	if !isNumber || !isText {
		return nil, invalid("the request does not fit the protocol")
	}
	return &request{seq, method, items[2:]}, nil
}

// append_ is one record that a request brings.
type append_ struct {
	channel   string
	timestamp uint64
	payload   []byte
}

func (f *frame) appends(names []any) ([]append_, error) {
	found := make([]append_, f.rows)
	start := 0
	for i := range found {
		row := f.body[i*rowBytes:]
		number, end := binary.BigEndian.Uint32(row), start+int(binary.BigEndian.Uint32(row[4:]))
		if int(number) >= len(names) || end > len(f.payloads) {
			return nil, invalid("a row of the request does not fit the rest of it")
		}
		name, isText := names[number].(string)
		if !isText {
			return nil, invalid("the name of a channel is no text")
		}
		found[i] = append_{name, binary.BigEndian.Uint64(row[16:]), f.payloads[start:end:end]}
		start = end
	}
	if start != len(f.payloads) {
		return nil, invalid("the rows of the request do not fit its payloads")
	}
	return found, nil
}

// encodeFrame makes a frame of a message; with records, as an answer to `read` has them.
func encodeFrame(message any, records []record) []byte {
	head, err := msgpack.Marshal(message)
	if err != nil {
		panic(err) // answers are made of plain values
	}
	size := 0
	for _, each := range records {
		size += len(each.payload)
	}
	whole := make([]byte, 0, headerBytes+len(head)+len(records)*rowBytes+size)
	whole = binary.BigEndian.AppendUint32(whole, uint32(len(head)))
	whole = binary.BigEndian.AppendUint32(whole, uint32(len(records)))
	whole = binary.BigEndian.AppendUint32(whole, uint32(size))
	whole = append(whole, head...)
	for _, each := range records {
		whole = binary.BigEndian.AppendUint32(whole, 0)
		whole = binary.BigEndian.AppendUint32(whole, uint32(len(each.payload)))
		whole = binary.BigEndian.AppendUint64(whole, each.id)
		whole = binary.BigEndian.AppendUint64(whole, each.timestamp)
	}
	for _, each := range records {
		whole = append(whole, each.payload...)
	}
	return whole
}

// ---- values in heads

func natural(value any) (uint64, bool) {
	switch number := reflect.ValueOf(value); {
	case number.CanInt():
		return uint64(number.Int()), number.Int() >= 0
	case number.CanUint():
		return number.Uint(), true
	}
	return 0, false
}

func idOf(value any) (uint64, bool) {
	id, isBytes := value.([]byte)
	if !isBytes || len(id) != 8 {
		return 0, false
	}
	return binary.BigEndian.Uint64(id), true
}

func wireID(id uint64) []byte { return binary.BigEndian.AppendUint64(nil, id) }

// wireLatest is nil where there is no id.
func wireLatest(id uint64) any {
	if id == 0 {
		return nil
	}
	return wireID(id)
}
