// health says how GitOps tools read objects: kstatus, on which Flux, Helm and kubectl rest, and a health check in Lua
// as Argo CD runs it.
//
// Usage: health FILE.lua <objects.json >verdicts.json
//
// Standard input is a JSON array of objects; standard output one of verdicts in the same order.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	lua "github.com/yuin/gopher-lua"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// luaLimit is what Argo CD gives a health check.
const luaLimit = time.Second

type verdict struct {
	Kstatus        string `json:"kstatus"`
	KstatusMessage string `json:"kstatusMessage"`
	Argo           string `json:"argo"`
	ArgoMessage    string `json:"argoMessage"`
}

func main() {
	if err := run(os.Args[1:], os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "health:", err)
		os.Exit(1)
	}
}

func run(arguments []string, in io.Reader, out io.Writer) error {
	if len(arguments) != 1 {
		return fmt.Errorf("want the path of one health check, got %d arguments", len(arguments))
	}
	script, err := os.ReadFile(arguments[0])
	if err != nil {
		return err
	}
	data, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	// The decoder of unstructured objects: whole numbers stay whole, as they are in a controller.
	var list unstructured.UnstructuredList
	if err := list.UnmarshalJSON(data); err != nil {
		return fmt.Errorf("standard input is not a List of objects: %w", err)
	}
	verdicts := make([]verdict, 0, len(list.Items))
	for index := range list.Items {
		found, err := judge(&list.Items[index], string(script))
		if err != nil {
			return fmt.Errorf("object %d (%s): %w", index, list.Items[index].GetName(), err)
		}
		verdicts = append(verdicts, found)
	}
	return json.NewEncoder(out).Encode(verdicts)
}

func judge(object *unstructured.Unstructured, script string) (verdict, error) {
	reading, err := status.Compute(object)
	if err != nil {
		return verdict{}, fmt.Errorf("kstatus: %w", err)
	}
	// What is being deleted is in progress for Argo CD, which then runs no check.
	health, message := "Progressing", "being deleted"
	if object.GetDeletionTimestamp() == nil {
		if health, message, err = runCheck(object.Object, script); err != nil {
			return verdict{}, fmt.Errorf("the health check: %w", err)
		}
	}
	return verdict{
		Kstatus: reading.Status.String(), KstatusMessage: reading.Message, Argo: health, ArgoMessage: message,
	}, nil
}

// runCheck runs a health check with the libraries that Argo CD opens for those of users: base, package and table.
func runCheck(object map[string]any, script string) (health, message string, err error) {
	state := lua.NewState(lua.Options{SkipOpenLibs: true})
	defer state.Close()
	for name, open := range map[string]lua.LGFunction{
		lua.LoadLibName: lua.OpenPackage, lua.BaseLibName: lua.OpenBase, lua.TabLibName: lua.OpenTable,
	} {
		call := lua.P{Fn: state.NewFunction(open), Protect: true}
		if err := state.CallByParam(call, lua.LString(name)); err != nil {
			return "", "", err
		}
	}
	limit, cancel := context.WithTimeout(context.Background(), luaLimit)
	defer cancel()
	state.SetContext(limit)
	state.SetGlobal("obj", toLua(state, object))
	if err := state.DoString(script); err != nil {
		return "", "", err
	}
	table, ok := state.Get(-1).(*lua.LTable)
	if !ok {
		return "", "", fmt.Errorf("it returned a %s instead of a table", state.Get(-1).Type())
	}
	health = lua.LVAsString(table.RawGetString("status"))
	switch health {
	case "Healthy", "Progressing", "Degraded", "Suspended", "Missing", "Unknown":
		return health, lua.LVAsString(table.RawGetString("message")), nil
	}
	return "", "", fmt.Errorf("Argo CD knows no health status %q", health)
}

func toLua(state *lua.LState, value any) lua.LValue {
	switch value := value.(type) {
	case bool:
		return lua.LBool(value)
	case int64:
		return lua.LNumber(value)
	case float64:
		return lua.LNumber(value)
	case string:
		return lua.LString(value)
	case []any:
		table := state.CreateTable(len(value), 0)
		for _, item := range value {
			table.Append(toLua(state, item))
		}
		return table
	case map[string]any:
		table := state.CreateTable(0, len(value))
		for key, item := range value {
			table.RawSetString(key, toLua(state, item))
		}
		return table
	}
	return lua.LNil
}
