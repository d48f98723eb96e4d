package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/zilliztech/woodpecker/common/config"
	"github.com/zilliztech/woodpecker/woodpecker/log"
)

// benchSettings are those of TIDEWAL_WOODPECKER_CONFIG.
func benchSettings(b *testing.B) *config.Configuration {
	path := os.Getenv("TIDEWAL_WOODPECKER_CONFIG")
	if path == "" {
		b.Skip("TIDEWAL_WOODPECKER_CONFIG names no settings")
	}
	settings, err := loaded([]string{path})
	if err != nil {
		b.Fatal(err)
	}
	return settings
}

// benchSizes are those of the records, by name.
var benchSizes = map[string]int{"1KiB": 1 << 10, "64KiB": 64 << 10}

// bySize runs a benchmark for each size of records, of which so many are appended as fill a pack.
func bySize(b *testing.B, run func(b *testing.B, settings *config.Configuration, records []record)) {
	settings := benchSettings(b)
	for name, size := range benchSizes {
		records := make([]record, packBytes/(size+recordOverhead))
		for i := range records {
			records[i].payload = make([]byte, size)
		}
		b.Run(name, func(b *testing.B) { run(b, settings, records) })
	}
}

func reportRecords(b *testing.B, each int) {
	b.ReportMetric(float64(b.N*each)/b.Elapsed().Seconds(), "records/s")
}

// BenchmarkSidecar appends the same records as BenchmarkDirect over the socket: a pack in a request, and so many
// requests on their way that the writer is never short of packs.
func BenchmarkSidecar(b *testing.B) { bySize(b, sidecarAppends) }

func sidecarAppends(b *testing.B, settings *config.Configuration, records []record) {
	client, etcd, err := connected(context.Background(), settings)
	if err != nil {
		b.Fatal(err)
	}
	owner, err := newSidecar(context.Background(), client, etcd, nil)
	if err != nil {
		b.Fatal(err)
	}
	name := fmt.Sprintf("sidecar-%d", time.Now().UnixNano())
	if err := owner.create(context.Background(), name, policy{MaxMessageBytes: 1 << 20}); err != nil {
		b.Fatal(err)
	}
	path := filepath.Join(b.TempDir(), "socket")
	listener, err := net.Listen("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	go func() { _ = newServer(owner).serve(listener) }()
	here, err := net.Dial("unix", path)
	if err != nil {
		b.Fatal(err)
	}
	answers := bufio.NewReader(here)
	_, _ = here.Write(encodeFrame([]any{1, "hello", protocolVersion, nil}, nil))
	if _, err := readFrame(answers); err != nil {
		b.Fatal(err)
	}
	asked := encodeFrame([]any{2, "append", 1, 0, []string{name}}, records)
	turns, done := make(chan struct{}, 2*packsInFlight), make(chan error)
	b.SetBytes(int64(len(records) * len(records[0].payload)))
	b.ResetTimer()
	go func() {
		var failed error
		for range turns {
			if _, err := readFrame(answers); err != nil {
				failed = err
			}
		}
		done <- failed
	}()
	for b.Loop() {
		turns <- struct{}{}
		if _, err := here.Write(asked); err != nil {
			b.Fatal(err)
		}
	}
	close(turns)
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	reportRecords(b, len(records))
}

// BenchmarkDirect appends through the library what the sidecar would, the same packs and as many on their way, without a
// socket: what the sidecar's own rate is compared with, and that of a process of Tidewal (benchmarks/woodpecker.py).
func BenchmarkDirect(b *testing.B) { bySize(b, directAppends) }

func directAppends(b *testing.B, settings *config.Configuration, records []record) {
	client, _, err := connected(context.Background(), settings)
	if err != nil {
		b.Fatal(err)
	}
	name := fmt.Sprintf("direct-%d", time.Now().UnixNano())
	if err := client.CreateLog(context.Background(), name); err != nil {
		b.Fatal(err)
	}
	handle, err := client.OpenLog(context.Background(), name)
	if err != nil {
		b.Fatal(err)
	}
	writer, err := handle.OpenLogWriter(context.Background())
	if err != nil {
		b.Fatal(err)
	}
	flights := make(chan (<-chan *log.WriteResult), packsInFlight)
	done := make(chan error)
	b.SetBytes(int64(len(records) * len(records[0].payload)))
	b.ResetTimer()
	go func() {
		var failed error
		for result := range flights {
			if outcome := <-result; outcome.Err != nil {
				failed = outcome.Err
			}
		}
		done <- failed
	}()
	for b.Loop() {
		flights <- writer.WriteAsync(context.Background(), &log.WriteMessage{Payload: encodePack(1, records)})
	}
	close(flights)
	if err := <-done; err != nil {
		b.Fatal(err)
	}
	reportRecords(b, len(records))
}
